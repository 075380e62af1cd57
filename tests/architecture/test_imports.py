"""Importing costs nothing: no jax, no numpy, no network; public names load on first use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve

NO_NETWORK = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
        raise RuntimeError(f"{event} at import")
sys.addaudithook(refuse)
"""


def _run(root: Path, code: str) -> str:
    """What a fresh interpreter prints. Fails the test with its stderr when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["jaxserve", "jaxserve.scheduler", "jaxserve.errors", "jaxserve.outputs", "jaxserve.sampling_params"]
)
def test_plain_modules_import_neither_jax_nor_numpy(root, module):
    code = f"{NO_NETWORK}\nimport {module}\nprint(sorted({{'jax', 'jaxlib', 'numpy'}} & set(sys.modules)))"
    assert _run(root, code) == "[]"


def test_sampling_params_come_without_jax(root):
    code = "import sys, jaxserve; jaxserve.SamplingParams(); jaxserve.JaxserveError; print('jax' in sys.modules)"
    assert _run(root, code) == "False"


def test_the_engine_takes_no_network_at_import(root):
    assert _run(root, f"{NO_NETWORK}\nfrom jaxserve import LLM\nprint(LLM.__name__)") == "LLM"


@pytest.mark.parametrize("name", [name for name in jaxserve.__all__ if name != "__version__"])
def test_public_names_resolve_to_what_they_say(name):
    assert getattr(jaxserve, name).__name__ == name


def test_public_names_are_listed_and_others_are_refused():
    assert set(jaxserve.__all__) <= set(dir(jaxserve))
    assert isinstance(jaxserve.__version__, str)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = jaxserve.LMM
