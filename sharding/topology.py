"""Devices that are not there: a TPU slice or GPU nodes, described so that jax's compilers compile for them.

`v5p:4x4x8` is a slice by its chips, `h200:2x8` nodes by GPUs, `cpu:4` virtual devices of this process. The compilers
are in packages of their own, which this one can do without.
"""

import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from sharding.devices import DeviceKind, device_kinds

MAX_DEVICES = 16384
_SPECS = Path(__file__).with_name("gpu_specs")
_PACKAGES = {
    "tpu": (("libtpu",), "pip install 'jaxserve[plan-tpu]' (libtpu)"),
    "cuda": (
        ("jax_cuda13_plugin", "jax_plugins.xla_cuda13"),
        "pip install 'jaxserve[plan-gpu]' (jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc, nvidia-nvvm, "
        "nvidia-cuda-runtime)",
    ),
}


class CompilerMissing(ImportError):
    """The compiler for a topology is in packages that are not installed; the message names them."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices of one kind. shape: of the slice in chips, (nodes, GPUs), or (virtual devices,)."""

    device: DeviceKind
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.device.devices_per_chip

    @property
    def platform(self) -> str:
        return self.device.platform

    @property
    def memory_bytes(self) -> int:
        """Memory of one device that programs can use; an equal share of this machine's for virtual ones."""
        if self.device.memory_bytes:
            return self.device.memory_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.num_devices

    def __str__(self) -> str:
        return f"{self.device.name}:{'x'.join(map(str, self.shape))}"


def read_topology(text: str) -> Topology:
    """The topology of a name such as v5p:4x4x8. ValueError says what is allowed."""
    known = device_kinds()
    name, _, where = text.partition(":")
    if name not in known or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", where):
        raise ValueError(
            f"{text!r:.60} is no topology; expected KIND:SHAPE, such as v5e:4x4, v5p:4x4x8, h200:8, h200:2x8 or cpu:4, "
            f"KIND being one of {', '.join(known)}"
        )
    device = known[name]
    shape = tuple(map(int, where.split("x")))
    axes = {"cpu": 1, "cuda": 2}.get(device.platform, device.torus_axes)
    if device.platform == "cuda" and len(shape) == 1:
        shape = (1, *shape)
    if len(shape) != axes:
        form = {"cpu": "cpu:DEVICES", "cuda": f"{name}:GPUS or {name}:NODESxGPUS"}
        wanted = form.get(device.platform, f"{name}:{'x'.join('ABC'[:axes])}")
        raise ValueError(f"{text!r:.60}: expected {wanted}")
    topology = Topology(device=device, shape=shape)
    if topology.num_devices > MAX_DEVICES:
        raise ValueError(f"{text!r:.60} has {topology.num_devices:,} devices; at most {MAX_DEVICES:,} can be planned")
    if device.devices_per_host is not None and shape[-1] > device.devices_per_host:
        raise ValueError(f"{text!r:.60}: a node has {device.devices_per_host} GPUs at most; {name}:NODESxGPUS has more")
    return topology


def check_compiler(topology: Topology) -> None:
    """Raises CompilerMissing where the compiler for these devices is not installed."""
    modules, advice = _PACKAGES.get(topology.platform, ((), ""))
    if modules and not any(_is_there(module) for module in modules):
        raise CompilerMissing(f"{topology}: the compiler for {topology.device.kind} is not installed: {advice}")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def compiler_environment(topology: Topology) -> Mapping[str, str]:
    """Variables a process needs before it imports jax, to describe and compile for the topology without its devices.

    XLA_FLAGS are to be added to those there are.
    """
    variables = {"JAX_PLATFORMS": "cpu"}
    if topology.platform == "tpu":
        variables |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    if topology.platform == "cuda":  # CUB sorts ask a device how many bytes they take
        variables["XLA_FLAGS"] = "--xla_gpu_enable_cub_radix_sort=false"
    return variables


def described_devices(topology: Topology) -> list[Any]:
    """The devices, in the order of their numbers. In a process with `compiler_environment`.

    Raises CompilerMissing; ValueError where the compiler knows no such slice.
    """
    check_compiler(topology)
    if topology.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", topology.num_devices)
        return jax.devices("cpu")
    try:
        return list(_description(topology).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{topology}: the compiler refuses this topology: {reason:.300}") from error


def _description(topology: Topology) -> Any:
    shape = "x".join(map(str, topology.shape))
    if topology.platform == "tpu":
        return topologies.get_topology_desc(f"{topology.device.name}:{shape}", platform="tpu")
    spec = (_SPECS / f"{topology.device.name}.txtpb").read_text(encoding="utf-8")
    return topologies.get_topology_desc(platform="cuda", topology=f"1x{shape}", target_config=spec)
