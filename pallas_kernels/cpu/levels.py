"""CPU levels: the instruction sets that kernels are compiled for.

Levels rather than the host's own CPU, so that a cache folder serves every machine that mounts it and prebuilt objects
need few variants.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Level:
    """An LLVM CPU name and the features that kernels may rely on, as LLVM spells them."""

    name: str
    cpu: str
    features: tuple[str, ...]

    @property
    def feature_string(self) -> str:
        """For LLVM. 512-bit registers are used where there are some: LLVM's x86-64-v4 avoids them by itself."""
        prefer = ["-prefer-256-bit"] if "avx512f" in self.features else []
        return ",".join([f"+{feature}" for feature in self.features] + prefer)


_AVX2 = ("avx2", "fma", "f16c", "bmi", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
# Best first.
LEVELS = (
    Level(name="avx512vnni", cpu="x86-64-v4", features=(*_AVX512, "avx512vnni")),
    Level(name="avx512", cpu="x86-64-v4", features=_AVX512),
    Level(name="avx2", cpu="x86-64-v3", features=_AVX2),
    Level(name="generic", cpu="generic", features=()),
)


def known_level(name: str) -> Level:
    """The level of that name, to compile for; this CPU may lack it. Raises ValueError for an unknown name."""
    found = [level for level in LEVELS if level.name == name]
    if not found:
        raise ValueError(f"unknown CPU level {name!r}; choose {', '.join(level.name for level in LEVELS)}")
    return found[0]


def level_named(name: str | None) -> Level:
    """The level of that name, to run here, or the best of this CPU when None.

    Raises ValueError for a name that does not exist and for a level whose instructions this CPU lacks.
    """
    has = _host_features()
    if name is None:
        return next(level for level in LEVELS if all(feature in has for feature in level.features))
    level = known_level(name)
    lacking = [feature for feature in level.features if feature not in has]
    if lacking:
        raise ValueError(f"CPU level {name!r} needs {', '.join(lacking)}, which this CPU lacks")
    return level


def _host_features() -> frozenset[str]:
    import llvmlite.binding as llvm  # not at import: only CPU backends pay for it

    features = llvm.get_host_cpu_features()
    return frozenset(feature for feature, present in features.items() if present)
