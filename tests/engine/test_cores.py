"""What limits the cores of a process, read from trees of files like Linux's."""

import re
from pathlib import Path

import pytest

from jaxserve.engine import cores
from jaxserve.engine.cores import usable_cores

CPUS = "sys/devices/system/cpu"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system with files and an affinity mask: system({"path": "content"}, cpus) -> its root."""

    def make(files: dict[str, str], cpus: range) -> Path:
        monkeypatch.setattr(cores, "_affinity", lambda: frozenset(cpus))
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        return tmp_path

    return make


def topology(places: list[tuple[int, int]]) -> dict[str, str]:
    """(package, core) of each logical CPU."""
    names = ("physical_package_id", "core_id")
    return {
        f"{CPUS}/cpu{cpu}/topology/{name}": str(value)
        for cpu, place in enumerate(places)
        for name, value in zip(names, place, strict=True)
    }


TWO_PACKAGES = [(package, core) for package in (0, 1) for core in (0, 1)]
GIVEN = "physical cores this process may use"


@pytest.mark.parametrize(
    ("places", "cpus", "expected"),
    [
        (TWO_PACKAGES, range(4), 4),
        (TWO_PACKAGES * 2, range(8), 4),
        (TWO_PACKAGES * 2, range(1, 3), 2),
        ([(0, 0), (0, 0), (0, 1), (0, 1)], range(2), 1),
        ([], range(6), 6),
    ],
    ids=["one thread a core", "two threads a core", "a mask over cores", "a mask over one core", "nothing known"],
)
def test_threads_of_one_core_count_once(system, places, cpus, expected):
    assert usable_cores(system(topology(places), cpus)) == (expected, GIVEN)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, 3),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/not/here", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "1600000 100000"}, 8),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:cpuset:/",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
    ids=["v2", "v2 parent", "v2 in a container", "v2 below one", "v2 none", "v2 above", "v1", "v1 none"],
)
def test_a_quota_counts(system, files, expected):
    number, reason = usable_cores(system(files, range(8)))
    assert number == expected
    assert (reason == GIVEN) == (expected == 8)


def test_a_quota_is_named(system):
    root = system({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, range(8))
    assert usable_cores(root) == (2, "the CPU quota of its control group, 1.5 cores")


def test_this_system_has_some():
    number, reason = usable_cores()
    assert number >= 1
    assert re.search("physical cores|quota", reason)
