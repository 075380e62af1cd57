"""A sharding plan: how many devices an engine spreads a model over, and which axes of its arrays they cut.

Axes are the logical ones of axes.py. `tensor` cuts heads, widths of feed-forward parts and the vocabulary, as in
Megatron-LM (arXiv 1909.08053); `expert` deals the experts of a mixture out, and everything else is on each of its
devices.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

TENSOR, EXPERT = "tensor", "expert"
CUT_OVER = {"heads": TENSOR, "kv_heads": TENSOR, "ffn": TENSOR, "vocab": TENSOR, "experts": EXPERT}
MAX_PLAN_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Sizes of the mesh axes; their product is the number of devices."""

    tensor: int = 1
    expert: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.expert

    def size(self, logical_axis: str) -> int:
        """Into how many parts this plan cuts an axis."""
        return {TENSOR: self.tensor, EXPERT: self.expert}.get(CUT_OVER.get(logical_axis, ""), 1)

    def partition(self, axes: Sequence[str]) -> PartitionSpec:
        """Which mesh axis cuts each axis of an array."""
        return PartitionSpec(*(CUT_OVER[axis] if self.size(axis) > 1 else None for axis in axes))

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """The first devices as a mesh: neighbours along `tensor`, whose sums are the more frequent ones."""
        if len(devices) < self.num_devices:
            raise ValueError(f"{self} needs {self.num_devices} devices and there are {len(devices)}")
        grid = np.asarray(devices[: self.num_devices]).reshape(self.expert, self.tensor)
        return Mesh(grid, (EXPERT, TENSOR))

    def __str__(self) -> str:
        return f"tensor {self.tensor} x expert {self.expert}"


def read_plan(path: Path) -> ShardingPlan:
    """The plan in a TOML file: a table [mesh] with the sizes. ValueError says what is wrong with it.

    [mesh]
    tensor = 4
    expert = 2
    """
    if path.stat().st_size > MAX_PLAN_BYTES:
        raise ValueError(f"{path} is no plan: {path.stat().st_size:,} bytes")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    return _plan_of(content, str(path))


def _plan_of(content: Mapping[str, Any], where: str) -> ShardingPlan:
    mesh = content.get("mesh")
    unknown = sorted(content.keys() - {"mesh"})
    if not isinstance(mesh, dict) or unknown:
        raise ValueError(f"{where}: expected one table [mesh]" + (f", found {', '.join(unknown)}" if unknown else ""))
    for name, size in mesh.items():
        if name not in (TENSOR, EXPERT) or type(size) is not int or size < 1:
            raise ValueError(f"{where}: [mesh] {name} = {size!r:.40}; allowed are tensor and expert, at least 1 each")
    return ShardingPlan(**mesh)
