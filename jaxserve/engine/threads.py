"""The size of XLA's intra-op thread pool on the host: our CPU kernels and XLA's own run on it, and on nothing else."""

import os
from pathlib import Path

import jax

from jaxserve.config import Choice
from jaxserve.engine.cores import usable_cores
from jaxserve.errors import ConfigError

POOL_THREAD = "tf_XLAEigen"  # the name XLA gives the threads of that pool, in jaxlib 0.11.2 and 0.12


def settle_threads(wanted: int | None) -> Choice:
    """Sizes the pool, `wanted` None: one thread for each usable core. Call it before anything asks jax for a device.

    The pool is made once, with the process's first CPU client. When that exists, its size is kept; raises ConfigError
    if another one is wanted by name.
    """
    cores, reason = usable_cores()
    threads, reason = (wanted, "--threads") if wanted else (cores, reason)
    existing = pool_size()
    if existing is None:
        # XLA takes the number from this variable, the only way to say it, and reads it when the client is made. It is
        # set for C code and children only: Python's own os.environ stays as the user made it.
        os.putenv("NPROC", str(threads))
        devices = jax.devices()
        if devices[0].platform == "cpu" and len(devices) > threads:
            return Choice(len(devices), f"XLA makes at least one for each of its devices; {reason}: {threads}")
        return Choice(threads, reason)
    if wanted and existing != wanted:
        raise ConfigError(
            f"--threads {wanted}: JAX already runs with {existing} in this process and cannot change it; leave it out, "
            "or start the first LLM with it, before anything else uses JAX"
        )
    return Choice(existing, reason if existing == threads else "JAX was started before in this process, with so many")


def pool_size(tasks: Path = Path("/proc/self/task")) -> int | None:
    """Threads in the pool; None when there is no CPU client yet, or where the system does not tell."""
    names = [_name(task) for task in tasks.iterdir()] if tasks.is_dir() else []
    return names.count(POOL_THREAD) or None


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it ended meanwhile
        return ""
