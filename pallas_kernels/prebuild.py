"""`python -m pallas_kernels.prebuild`: compiles every CPU kernel into the package's folder, for the next wheel.

Arguments: the levels, by default those of pallas_kernels.cpu.prebuilt. What is there and still right is kept.
"""

import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.cpu import prebuilt


def all_functions() -> list[str]:
    """Every target of every op, as "module:attribute": what `all_functions()` of each op's cpu.py lists."""
    ops = sorted(path.parent.name for path in Path(__file__).parent.glob("*/cpu.py"))
    modules = [importlib.import_module(f"pallas_kernels.{op}.cpu") for op in ops]
    return sorted(function for module in modules for function in module.all_functions())


def main(levels: Sequence[str]) -> None:
    """Says on stderr how far it is."""
    start, functions = time.perf_counter(), all_functions()

    def say(level: str, done: int, total: int) -> None:
        print(f"{level}: {done} of {total}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    num_built = prebuilt.prebuild(functions, levels=levels or prebuilt.LEVELS, progress=say)
    objects = list(prebuilt.FOLDER.glob("*/*.o"))
    num_bytes = sum(path.stat().st_size for path in objects)
    print(f"{prebuilt.FOLDER}: {len(objects)} objects, {num_bytes:,} bytes, {num_built} of them compiled now")


if __name__ == "__main__":
    main(sys.argv[1:])
