"""The scheduler is plain Python: it can be tested, and understood, without any array library."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_importing_the_scheduler_imports_neither_jax_nor_numpy():
    code = "import sys, jaxserve.scheduler; print(sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
