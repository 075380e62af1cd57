"""Servers for these tests: the fake frontend behind a real uvicorn on loopback."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the fake and the tour are modules beside the tests

from loopback import running_server

from jaxserve.server.options import ServerOptions


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """serve(frontend, **options) -> base URL; stopped after the test."""
    with ExitStack() as stack:
        yield lambda frontend, **options: stack.enter_context(
            running_server(frontend, ServerOptions(drain_timeout_seconds=0.1, **options))
        )
