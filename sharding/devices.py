"""Kinds of devices and their public figures, from devices.toml; what a message between them takes."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

_TABLE = Path(__file__).with_name("devices.toml")
Platform = Literal["cpu", "tpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One row of devices.toml, whose comments say what each figure means.

    devices_per_host: how many the fast links join; None where they join all (a TPU slice). source: where the figures
    are published.
    """

    name: str
    platform: Platform
    kind: str
    memory_bytes: int
    memory_bytes_per_second: float
    flops: Mapping[str, float]
    link_bytes_per_second: float
    network_bytes_per_second: float
    devices_per_chip: int
    torus_axes: int
    hop_seconds: float
    source: str
    devices_per_host: int | None = None

    def flops_of(self, dtype: str) -> float:
        """Dense operations per second on operands of this type: bfloat16's where it has no rate of its own; half of
        that for float32, which is a guess at best."""
        if dtype in self.flops:
            return self.flops[dtype]
        return self.flops["bfloat16"] * (0.5 if dtype == "float32" else 1.0)

    def crosses_hosts(self, group: Sequence[int]) -> bool:
        """Whether devices with these numbers need the network between hosts."""
        return self.devices_per_host is not None and len({device // self.devices_per_host for device in group}) > 1

    def wire_seconds(self, kind: str, group: Sequence[int], wire_bytes: float) -> float:
        """Time of one collective: its bytes over the slowest link it needs, and the latency of its hops.

        A ring of n devices takes n - 1 steps one after another, in a torus the sum of half its axes; an all-reduce is
        two such passes (Rabenseifner; jax-ml.github.io/scaling-book/sharding).
        """
        n = len(group)
        if n < 2:
            return 0.0
        bandwidth = self.network_bytes_per_second if self.crosses_hosts(group) else self.link_bytes_per_second
        axes = self.torus_axes
        hops = n - 1 if not axes else max(1.0, axes * n ** (1 / axes) / 2)
        passes = 2 if kind == "all-reduce" else 1
        return wire_bytes / bandwidth + passes * hops * self.hop_seconds


@cache
def device_kinds() -> Mapping[str, DeviceKind]:
    """All known kinds by name."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {name: DeviceKind(name=name, **row) for name, row in table.items()}
