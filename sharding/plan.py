"""A sharding plan: how many devices an engine spreads a model over, and which axes of its arrays they cut.

Axes are the logical ones of axes.py. `tensor` cuts heads, widths of feed-forward parts and the vocabulary, as in
Megatron-LM (arXiv 1909.08053); `expert` deals the experts of a mixture out, and everything else is on each of its
devices; `data` deals out requests: each group has its own, with their cache, and all weights but experts. The experts
are dealt out over the groups too (as DeepSeek-V3 is deployed, arXiv 2412.19437, section 3.4), unless a plan's rules say
that each group has all of them.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
MESH_AXES = (DATA, EXPERT, TENSOR)
CUT_OVER = {"heads": (TENSOR,), "kv_heads": (TENSOR,), "ffn": (TENSOR,), "vocab": (TENSOR,), "experts": (DATA, EXPERT)}
EXPERT_RULES = ((DATA, EXPERT), (EXPERT,))
MAX_PLAN_BYTES = 1 << 16
MAX_REDUNDANT = 1 << 12


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Sizes of the mesh axes; their product is the number of devices. experts_over: the axes that deal out experts.
    redundant_experts: slots beyond one for each expert, for copies of those that are asked for most."""

    tensor: int = 1
    expert: int = 1
    data: int = 1
    experts_over: tuple[str, ...] = (DATA, EXPERT)
    redundant_experts: int = 0

    @property
    def num_devices(self) -> int:
        return self.data * self.expert * self.tensor

    def mesh_size(self, axis: str) -> int:
        """Of a mesh axis."""
        return {DATA: self.data, EXPERT: self.expert, TENSOR: self.tensor}[axis]

    def cut_over(self, logical_axis: str) -> tuple[str, ...]:
        """The mesh axes, of more than one device, that cut a logical axis."""
        axes = self.experts_over if logical_axis == "experts" else CUT_OVER.get(logical_axis, ())
        return tuple(axis for axis in axes if self.mesh_size(axis) > 1)

    def size(self, logical_axis: str) -> int:
        """Into how many parts this plan cuts an axis."""
        return math.prod(self.mesh_size(axis) for axis in self.cut_over(logical_axis))

    def num_slots(self, num_experts: int) -> int:
        """Slots for experts: as many on each device."""
        parts = self.size("experts")
        return -(-(num_experts + self.redundant_experts) // parts) * parts

    def partition(self, axes: Sequence[str]) -> PartitionSpec:
        """Which mesh axes cut each axis of an array."""
        cuts = [self.cut_over(axis) for axis in axes]
        return PartitionSpec(*(cut if len(cut) > 1 else cut[0] if cut else None for cut in cuts))

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """The first devices as a mesh: neighbours along `tensor`, whose sums are the more frequent ones."""
        if len(devices) < self.num_devices:
            raise ValueError(f"{self} needs {self.num_devices} devices and there are {len(devices)}")
        grid = np.asarray(devices[: self.num_devices]).reshape(self.data, self.expert, self.tensor)
        return Mesh(grid, MESH_AXES)

    def __str__(self) -> str:
        sizes = f"tensor {self.tensor} x expert {self.expert}"
        return sizes if self.data == 1 else f"{sizes} x data {self.data}"


PRESETS: dict[str, Callable[[int], ShardingPlan]] = {
    "tensor": lambda n: ShardingPlan(tensor=n),
    "expert": lambda n: ShardingPlan(expert=n),
    "data": lambda n: ShardingPlan(data=n),
}
"""Plans by name, for so many devices: all along one axis. "data" is DeepSeek-V3's layout for decoding."""


def named_plan(name_or_path: str, num_devices: int) -> ShardingPlan:
    """The preset of this name for these devices, or the plan in this file. Raises ValueError, OSError."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path](num_devices)
    return read_plan(Path(name_or_path))


def read_plan(path: Path) -> ShardingPlan:
    """The plan in a TOML file: a table [mesh] with the sizes, and one of rules if there are any. ValueError says what
    is wrong with it.

    [mesh]
    tensor = 4
    expert = 2
    data = 2

    [rules]
    experts = ["data", "expert"]  # the default; ["expert"]: every data group has all experts

    [experts]
    redundant = 4
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
    unknown = sorted(content.keys() - {"mesh", "rules", "experts"})
    if not isinstance(mesh, dict) or unknown:
        found = f", found {', '.join(unknown)}" if unknown else ""
        raise ValueError(f"{where}: expected a table [mesh], and perhaps [rules] and [experts]{found}")
    for name, size in mesh.items():
        if name not in MESH_AXES or type(size) is not int or size < 1:
            raise ValueError(
                f"{where}: [mesh] {name} = {size!r:.40}; allowed are tensor, expert, data, at least 1 each"
            )
    experts = content.get("experts", {})
    redundant = experts.get("redundant", 0) if isinstance(experts, dict) and experts.keys() <= {"redundant"} else None
    if type(redundant) is not int or not 0 <= redundant < MAX_REDUNDANT:
        raise ValueError(f"{where}: [experts] has redundant only, a number from 0 to {MAX_REDUNDANT - 1}")
    over = _experts_over(content.get("rules", {}), where)
    return ShardingPlan(**mesh, experts_over=over, redundant_experts=redundant)


def _experts_over(rules: Any, where: str) -> tuple[str, ...]:
    if not isinstance(rules, dict) or rules.keys() - {"experts"}:
        raise ValueError(f"{where}: [rules] has experts only; heads, ffn and vocab are always cut over tensor")
    given = rules.get("experts", list(EXPERT_RULES[0]))
    if given not in [list(rule) for rule in EXPERT_RULES]:
        raise ValueError(f'{where}: [rules] experts = {given!r:.60}; allowed are ["data", "expert"] and ["expert"]')
    return tuple(given)
