"""Plans compiled one by one, each in a process with a time limit; what ends a compiler ends that process only."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.planning.request import PlanRequest
from sharding.topology import compiler_environment

TIME_LIMIT_SECONDS = 120.0
WORKER = "jaxserve.planning.worker"
_ROOT = Path(__file__).resolve().parents[2]


def compile_plan(
    request: PlanRequest, environment: Mapping[str, str], limit_seconds: float = TIME_LIMIT_SECONDS
) -> dict[str, Any]:
    """The facts of a plan (compilation.py), or {"failure": why} where its compiler aborted or took too long.

    environment: of the process. Raises ConfigError for what a person can put right.
    """
    needed = compiler_environment(request.where)
    flags = [each["XLA_FLAGS"] for each in (environment, needed) if "XLA_FLAGS" in each]
    variables = {**environment, **needed, "XLA_FLAGS": " ".join(flags)}
    variables["PYTHONPATH"] = str(_ROOT) + (f":{variables['PYTHONPATH']}" if variables.get("PYTHONPATH") else "")
    try:
        done = subprocess.run(
            [sys.executable, "-m", WORKER],
            input=json.dumps(request.as_dict()),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_seconds,
            env=variables,
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"compiling took longer than {limit_seconds:.0f} s (--time-limit)"}
    if done.returncode:
        return {"failure": _how_it_ended(done.returncode, done.stderr)}
    facts = json.loads(done.stdout.splitlines()[-1])
    if "error" in facts:
        raise ConfigError(facts["error"])
    return facts


def _how_it_ended(code: int, stderr: str) -> str:
    """One line: the signal or exit code, and the last thing said."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "without a word"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"the compiler's process {how}: {last:.300}"
