"""On what a benchmark ran: processor, versions, date. Figures without these cannot be compared."""

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("jaxserve", "jax", "jaxlib", "numpy")
CHOICES = (
    "device",
    "threads",
    "weights",
    "dtype",
    "kv_cache_dtype",
    "kernels",
    "max_num_seqs",
    "max_num_batched_tokens",
)


def machine_facts() -> dict[str, Any]:
    """This machine and moment."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    if hasattr(os, "getloadavg"):
        facts["load average, 1 min, at start"] = round(os.getloadavg()[0], 2)
    return facts | {package: _version(package) for package in PACKAGES}


def model_facts(name: str, choices: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The served model and what was chosen for it (a frontend's effective configuration)."""
    return {"model": name} | {key: choices[key]["value"] for key in CHOICES if key in choices}


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
