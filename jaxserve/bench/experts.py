"""What dealing experts out to devices costs: one layer of a mixture, alone and over several devices, at equal work."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

from jaxserve.bench.measure import interleaved, paired_ratios, spread
from jaxserve.bench.report import Figure, Report, Target
from jaxserve.engine.progress import Progress
from jaxserve.errors import ConfigError
from jaxserve.layers.moe import Routing, moe
from jaxserve.layers.spread import joined, own_total, total
from jaxserve.quant.dense import Dense
from pallas_kernels.kernels import XLA, Kernels

TARGET = Target(limit=1.5, is_floor=False)


@dataclass(frozen=True, kw_only=True)
class ExpertsSetup:
    """One layer: tokens of a step, experts, how many of them a token chooses, and sizes. kind: the mesh axis that deals
    experts out, "expert" (every device has all tokens) or "data" (each has its own)."""

    num_tokens: int = 512
    num_experts: int = 32
    num_chosen: int = 4
    hidden_size: int = 512
    expert_size: int = 512
    num_devices: int = 2
    kind: str = "expert"

    @property
    def dispatch_bytes(self) -> int:
        """What each device must receive to have the tokens, their experts and weights."""
        others = self.num_tokens - self.num_tokens // self.num_devices
        return others * (4 * self.hidden_size + 8 * self.num_chosen) if self.kind == "data" else 0

    @property
    def combine_bytes(self) -> int:
        """What each device must receive for the sums: a ring's share of a sum of all (twice for all of it)."""
        whole = 4 * self.num_tokens * self.hidden_size * (self.num_devices - 1) // self.num_devices
        return whole if self.kind == "data" else 2 * whole


def bench_experts(setup: ExpertsSetup, num_rounds: int, progress: Progress) -> Report:
    """The layer over devices against the layer on one, round by round, and the exchange alone."""
    devices = jax.devices()[: setup.num_devices]
    if len(devices) < setup.num_devices or setup.num_devices < 2:
        raise ConfigError(
            f"--devices {setup.num_devices}: jax sees {len(jax.devices())}, two or more are needed; on a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(2, setup.num_devices)} makes virtual ones"
        )
    for name, count in (("--tokens", setup.num_tokens), ("--experts", setup.num_experts)):
        if count % setup.num_devices:
            raise ConfigError(f"{name} {count} cannot be dealt out to {setup.num_devices} devices in equal parts")
    runs, outputs = _runs(setup, Mesh(np.array(devices), (setup.kind,)))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)
    with progress.task("rounds", num_rounds + 1) as advance:
        seconds = interleaved(runs, num_rounds=num_rounds, advance=advance)
    over = seconds["over devices"]
    figures = (
        Figure(
            name="over devices / one device", unit="x", value=spread(paired_ratios(over, seconds["one"])), target=TARGET
        ),
        Figure(name="one device", unit="ms", value=spread([1e3 * s for s in seconds["one"]])),
        Figure(name="over devices", unit="ms", value=spread([1e3 * s for s in over])),
        Figure(name="dispatch and combine alone", unit="ms", value=spread([1e3 * s for s in seconds["exchange"]])),
        Figure(name="dispatch, received by a device", unit="bytes", value=spread([setup.dispatch_bytes])),
        Figure(name="combine, received by a device", unit="bytes", value=spread([setup.combine_bytes])),
    )
    return Report(
        title="experts over devices",
        settings=dataclasses.asdict(setup),
        figures=figures,
        notes=("one layer; virtual devices of a CPU share its cores, so that equal work takes equal time at best",),
    )


def _runs(setup: ExpertsSetup, mesh: Mesh) -> tuple[dict[str, Callable[[int], float]], list[np.ndarray]]:
    """What to time by name, and the outputs of the layer on one device and on all."""
    weights, x = _layer(setup)
    routing, exists = Routing(num_chosen=setup.num_chosen), jnp.ones(setup.num_tokens, bool)
    kernels = dataclasses.replace(XLA, spread_over=(setup.kind,))
    by_token = PartitionSpec(setup.kind) if setup.kind == "data" else PartitionSpec()
    cuts: dict[str, Any] = {"router": PartitionSpec(), "experts": PartitionSpec(setup.kind)}

    def layer(kernels: Kernels, weights: Any, x: Array, exists: Array) -> Array:
        return moe(kernels, x, weights, routing, exists)[0]

    def exchange(x: Array) -> Array:
        return total(kernels, own_total(kernels, joined(kernels, x, "data", 0), "data"), "expert")

    spread_out = partial(jax.shard_map, mesh=mesh, out_specs=by_token, check_vma=False)
    one = jax.jit(partial(layer, XLA))
    many = jax.jit(spread_out(partial(layer, kernels), in_specs=(cuts, by_token, by_token)))
    only = jax.jit(spread_out(exchange, in_specs=(by_token,)))
    put = partial(jax.tree.map, lambda cut, tree: jax.device_put(tree, NamedSharding(mesh, cut)))
    placed = {name: put(cut, weights[name]) for name, cut in cuts.items()}
    x_there, exists_there = put(by_token, x), put(by_token, exists)
    calls = {
        "one": partial(one, weights, x, exists),
        "over devices": partial(many, placed, x_there, exists_there),
        "exchange": partial(only, x_there),
    }
    return {name: partial(_seconds, call) for name, call in calls.items()}, [
        np.asarray(calls[name]()) for name in ("one", "over devices")
    ]


def _layer(setup: ExpertsSetup) -> tuple[dict[str, Any], Float32[Array, "T D"]]:
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]))

    E, D, F = setup.num_experts, setup.hidden_size, setup.expert_size
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    experts = {name: Dense(array=random(*shape)) for name, shape in shapes.items()}
    return {"router": random(E, D), "experts": experts}, random(setup.num_tokens, D)


def _seconds(call: Callable[[], Array], number: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start
