"""The same model in another format, written by llama.cpp under its interpreter: its own best format, for both."""

import subprocess
from pathlib import Path

from jaxserve.bench.peers.engines import PEERS, SCRIPTS
from jaxserve.errors import ConfigError, JaxserveError

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16")


class RequantizeFailed(JaxserveError):
    """llama.cpp wrote no file, in one line why."""


def requantized(path: Path, file_format: str, python: str, folder: Path, timeout_seconds: float) -> Path:
    """The file in the folder, written unless it is there already. Raises RequantizeFailed, or ConfigError."""
    if file_format not in FORMATS:
        raise ConfigError(f"--requantize must be one of {', '.join(FORMATS)}, got {file_format!r}")
    stat = path.stat()
    target = folder / f"{path.stem}-{stat.st_size}-{stat.st_mtime_ns}-as-{file_format}.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    command = [python, str(SCRIPTS / "llama_cpp_quantize.py"), str(path), str(part), file_format]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequantizeFailed(f"--requantize {file_format}: {error}") from error
    if done.returncode != 0 or not part.exists():
        lines = done.stderr.strip().splitlines() or ["nothing on stderr"]
        hint = f" (pip install {PEERS['llama.cpp'].packages})" if "ModuleNotFoundError" in lines[-1] else ""
        raise RequantizeFailed(f"--requantize {file_format} under {python}: {lines[-1][-200:]}{hint}")
    part.rename(target)
    return target
