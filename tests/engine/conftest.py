"""Two compiled engines for the whole session: a tiny random model, and the real one."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

TINY = Path(__file__).resolve().parent.parent / "fixtures" / "models" / "llama_untied"


def _build(path: Path, **options: Any):
    from jaxserve.config import EngineConfig
    from jaxserve.engine.build import build_engine
    from jaxserve.engine.progress import Silent

    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    config = EngineConfig(model=str(path), deterministic=True, max_num_seqs=17, compilation_cache_dir=cache, **options)
    return build_engine(config, path, frozenset(), Silent(), warm_up=False)


@pytest.fixture(scope="session")
def tiny() -> Iterator[object]:
    """A random llama of two layers, 256 tokens of vocabulary."""
    built = _build(TINY, max_model_len=192, max_num_batched_tokens=64)
    yield built
    built.engine.close()


@pytest.fixture(scope="session")
def real(smollm2_path: Path) -> Iterator[object]:
    """SmolLM2-135M-Instruct."""
    built = _build(smollm2_path, max_model_len=256, max_num_batched_tokens=64)
    yield built
    built.engine.close()


@pytest.fixture
def built(request: pytest.FixtureRequest) -> object:
    """The engine a test names as its parameter."""
    return request.getfixturevalue(request.param)
