"""Refuses to go on when a foreign `sharding`, `checkpoints` or `pallas_kernels` stands where ours should.

The three names are common, so another package, a file in the working folder or an old clone on PYTHONPATH can come
first, and the failure would then be an odd AttributeError deep inside. Ours lie beside the `jaxserve` folder in a
clone, an editable install and an installed wheel alike, and their `__init__.py` carries a mark: the place tells an
earlier package on the path from ours, the mark tells a package that was installed over ours.
"""

import importlib.util
import os
import sys

OWN_PACKAGES = ("sharding", "checkpoints", "pallas_kernels")
MARK = b"Part of jaxserve"


def require_own_packages() -> None:
    """Returns if Python finds our three packages under their names. Costs well under a millisecond.

    Raises ImportError naming the file found instead and what to do about it.
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in OWN_PACKAGES:
        own = os.path.join(home, name, "__init__.py")
        found = _location(name)
        if found is None:
            raise ImportError(f"jaxserve's package {name!r} is missing: expected {own}. Install jaxserve again.")
        if not _is_same_file(found, own):
            raise ImportError(
                f"{found} hides jaxserve's own package {name!r} ({own}). Rename or remove it, take its folder off "
                "PYTHONPATH, start from another folder, or use a virtual environment without it."
            )
        if not _is_marked(own):
            raise ImportError(
                f"{own} is not jaxserve's: another distribution installed its {name!r} over it. Uninstall that one and "
                "run `pip install --force-reinstall --no-deps jaxserve`, or use a virtual environment without it."
            )


def _location(name: str) -> str | None:
    """The file, or for a namespace package the folder, that `import name` gives or has given."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), f"<module {name}>")
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _is_same_file(found: str, own: str) -> bool:
    """True for equal paths, and for different spellings of one file (links, relative entries of sys.path)."""
    return found == own or os.path.realpath(found) == os.path.realpath(own)


def _is_marked(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return MARK in file.read(4096)
    except OSError:
        return False
