"""Run by tests in a process of its own, with eight virtual devices: what a placed load holds, and what it took.

eight_devices.py compare MODEL LAYOUT       each device's parts against a load without a placement
eight_devices.py save MODEL TARGET          the model on eight devices, written as a native checkpoint
eight_devices.py memory MODEL LAYOUT        prints the host's peak bytes beyond the weights, and the weights' bytes
"""

import os
import sys
from pathlib import Path
from typing import Any

NUM_DEVICES = 8
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from jaxserve.engine.conversion import save  # noqa: E402
from jaxserve.engine.loading import LoadedModel, Recipe, load_model  # noqa: E402
from jaxserve.engine.placement import Placement  # noqa: E402
from jaxserve.engine.progress import Silent  # noqa: E402
from sharding.spec import ArraySpec  # noqa: E402

MESH = Mesh(np.array(jax.devices()), ("x",))


def over_outputs(parameter: str, spec: ArraySpec) -> NamedSharding | None:
    """Outputs over the devices where they divide, experts where only they do, one parameter on the default device."""
    if parameter == "unembed":
        return None
    axes: list[str | None] = [None] * len(spec.shape)
    candidates = [] if spec.is_vector else [len(spec.shape) - 2, 0]
    divided = [axis for axis in candidates if spec.shape[axis] % NUM_DEVICES == 0]
    if divided:
        axes[divided[0]] = "x"
    return NamedSharding(MESH, PartitionSpec(*axes))


def over_inputs(parameter: str, spec: ArraySpec) -> NamedSharding:
    """Inputs over the devices: for plain matrices only."""
    fits = not spec.is_vector and spec.shape[-1] % NUM_DEVICES == 0
    return NamedSharding(MESH, PartitionSpec(*[None] * (len(spec.shape) - 1), "x" if fits else None))


def load(path: str, layout: Any, placement: Any) -> LoadedModel:
    placed = None if placement is None else Placement(sharding=placement)
    return load_model(Path(path), Recipe(layout=layout, dtype="bfloat16"), Silent(), placed)


def compare(path: str, layout: str) -> None:
    """Every value equal, and matrices really divided."""
    whole = load(path, layout, None)
    is_plain = set(whole.file_bytes) <= {"F32", "F16", "BF16"}
    for placement in (over_outputs, over_inputs) if is_plain else (over_outputs,):
        parts = load(path, layout, placement)
        assert jax.tree.structure(whole.params) == jax.tree.structure(parts.params)
        for want, got in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
            assert want.dtype == got.dtype
            np.testing.assert_array_equal(np.asarray(want), np.asarray(got))
        num_divided = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(parts.params))
        assert num_divided > 8, num_divided


def memory(path: str, layout: str) -> None:
    def kilobytes(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    jax.device_put(np.zeros(NUM_DEVICES), NamedSharding(MESH, PartitionSpec("x"))).block_until_ready()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is used now
    before = kilobytes("VmRSS:")
    params = load(path, layout, over_outputs).params
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    print((kilobytes("VmHWM:") - before) * 1024 - held, held)


if __name__ == "__main__":
    command, model, last = sys.argv[1:]
    if command == "save":
        save(load(model, "packed", over_outputs), Path(last), Silent(), overwrite=False)
    else:
        {"compare": compare, "memory": memory}[command](model, last)
