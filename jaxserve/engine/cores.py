"""How many cores this process may keep busy: its affinity mask, its cgroups' CPU quota, physical cores behind both.

Linux tells it in files; where they are missing, as on other systems, a limit they would give does not count.
"""

import math
import os
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def usable_cores(root: Path = ROOT) -> tuple[int, str]:
    """The number, at least one, and the limit that set it, in words. Two threads of one physical core count as one."""
    cpus = _affinity()
    limits = [(_num_physical(cpus, root), "physical cores this process may use")]
    if (quota := _quota(root)) is not None:
        limits.append((max(1, math.ceil(quota)), f"the CPU quota of its control group, {quota:g} cores"))
    return min(limits)


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _num_physical(cpus: frozenset[int], root: Path) -> int:
    """Cores behind the logical CPUs; a CPU the system says nothing about is a core of its own."""
    folders = {cpu: root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in cpus}
    names = ("physical_package_id", "die_id", "core_id")  # a core's number is unique in its die only
    places = {cpu: tuple(_text(folder / name) for name in names) for cpu, folder in folders.items()}
    return len({place if place[-1] is not None else cpu for cpu, place in places.items()})


def _quota(root: Path) -> float | None:
    """The smallest quota, in cores, of the process's control groups and those around them; None for no quota."""
    quotas = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            quotas += [_v2_quota(folder) for folder in _around(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            quotas += [_v1_quota(folder) for folder in _around(root / "sys/fs/cgroup" / controllers, group)]
            quotas += [_v1_quota(folder) for folder in _around(root / "sys/fs/cgroup/cpu", group)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _around(mount: Path, group: str) -> list[Path]:
    """The folders of a group and its parents. In a container the group's own path may not be visible: the mount is."""
    path = PurePosixPath(group.lstrip("/"))
    return [mount / part for part in (path, *path.parents)]


def _v2_quota(folder: Path) -> float | None:
    quota, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
    return None if quota == "max" else int(quota) / int(period)


def _v1_quota(folder: Path) -> float | None:
    quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return None if quota is None or period is None or int(quota) < 0 else int(quota) / int(period)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
