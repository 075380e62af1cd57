"""Object files that a wheel brings along, so that nothing is compiled where it is installed.

They lie in prebuilt/ beside this file, one folder for each level, under their source keys: an object is only found by
the very sources, level and kind of machine it was made for, and a wheel for any machine may carry them. index.json
says which compilers made them; without it there are none.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.cpu.build import build
from pallas_kernels.cpu.keys import installed_compilers, short_name, source_key
from pallas_kernels.cpu.levels import Level, known_level
from pallas_kernels.cpu.object_files import read_object

FOLDER = Path(__file__).parent / "prebuilt"
# Between the best and AVX2 lie few machines; they compile.
LEVELS = ("avx512vnni", "avx2", "generic")
_INDEX = "index.json"


@dataclass(frozen=True, kw_only=True)
class PrebuiltObjects:
    """A folder of objects and what made them; compilers None: there are none."""

    folder: Path
    compilers: str | None

    def path_of(self, function: str, level: Level) -> Path | None:
        """The sound object of a function as its sources are now, or None."""
        path = self.folder / _file_name(function, level)
        return path if self.compilers is not None and read_object(path) is not None else None


def open_prebuilt(folder: Path = FOLDER) -> PrebuiltObjects:
    """What a folder holds; it may not be there."""
    try:
        compilers = json.loads((folder / _INDEX).read_text())["compilers"]
    except FileNotFoundError:
        compilers = None
    return PrebuiltObjects(folder=folder, compilers=compilers)


def prebuild(
    functions: Iterable[str],
    *,
    levels: Iterable[str] = LEVELS,
    folder: Path = FOLDER,
    progress: Callable[[str, int, int], None] = lambda level, done, total: None,
) -> int:
    """Makes the folder hold the objects of these functions and levels and no others; returns how many it compiled.

    This CPU may lack the levels. Sound objects that the same compilers made are kept. Raises KernelBuildError, and
    PackageNotFoundError without numba.
    """
    compilers = installed_compilers()
    functions = sorted(set(functions))
    before = open_prebuilt(folder)
    wanted = {level: {f: folder / _file_name(f, level) for f in functions} for level in map(known_level, levels)}
    kept = {path for paths in wanted.values() for path in paths.values()} if before.compilers == compilers else set()
    (folder / _INDEX).unlink(missing_ok=True)  # until all are there
    for path in folder.glob("*/*.o"):
        if path not in kept:
            path.unlink()
    num_built = 0
    for level, paths in wanted.items():
        missing = {function: path for function, path in paths.items() if read_object(path) is None}
        build(missing, level, lambda done, total, level=level: progress(level.name, done, total))
        num_built += len(missing)
    (folder / _INDEX).write_text(json.dumps({"compilers": compilers}) + "\n")
    return num_built


def _file_name(function: str, level: Level) -> str:
    key = source_key(function, level)
    return f"{level.name}/{short_name(function)}-{key}.o"
