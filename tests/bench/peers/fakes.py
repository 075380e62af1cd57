"""Commands that start the fake engine, and what its log says."""

import json
import sys
from pathlib import Path

from jaxserve.bench.peers.engines import SCRIPTS, EngineCommand

FAKE = Path(__file__).parent / "fake_engine.py"


def fake_command(name, packages="some-package", **faults):
    """The engine of this name with these faults; see fake_engine."""
    arguments = (sys.executable, str(FAKE), str(SCRIPTS / "exchange.py"), json.dumps(faults | {"name": name}))
    return EngineCommand(name=name, command=arguments, packages=packages)


def logged(path):
    """What the engines wrote to their log, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()]
