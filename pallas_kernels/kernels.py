"""`Kernels`: which implementation serves each op. The one place where backends are swapped."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxtyping import Array

from pallas_kernels.cpu.targets import Targets
from pallas_kernels.grouped_matmul import cpu as grouped_cpu
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.grouped_matmul import xla as grouped_xla
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.mla_attention import cpu as mla_cpu
from pallas_kernels.mla_attention import reference as mla_reference
from pallas_kernels.mla_attention import xla as mla_xla
from pallas_kernels.mla_attention.latent_pages import LatentPages
from pallas_kernels.paged_attention import cpu as attention_cpu
from pallas_kernels.paged_attention import reference as attention_reference
from pallas_kernels.paged_attention import xla as attention_xla
from pallas_kernels.quantized_matmul import cpu as matmul_cpu
from pallas_kernels.quantized_matmul import reference as matmul_reference
from pallas_kernels.quantized_matmul import xla as matmul_xla

KernelName = Literal["auto", "reference", "xla", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One field per op. A named choice never falls back: an op that cannot serve a shape raises with the reason.

    spread_over: mesh axes over which the program runs that calls the ops, each device with its part of the weights
    (under shard_map); empty on one device. "data" is among them where groups with requests of their own share experts.
    """

    name: str
    new_pages: Callable[..., KVPages]
    rope_write_kv: Callable[..., tuple[Array, KVPages]]
    paged_attention: Callable[..., Array]
    check_page_size: Callable[[int], None]
    quantized_matmul: Callable[..., Array]
    grouped_matmul: Callable[..., Array]
    new_latent_pages: Callable[..., LatentPages]
    write_latent: Callable[..., LatentPages]
    mla_attention: Callable[..., Array]
    spread_over: tuple[str, ...] = ()


REFERENCE = Kernels(
    name="reference",
    new_pages=attention_reference.new_pages,
    rope_write_kv=attention_reference.rope_write_kv,
    paged_attention=attention_reference.paged_attention,
    check_page_size=lambda page_size: None,
    quantized_matmul=matmul_reference.quantized_matmul,
    grouped_matmul=grouped_reference.grouped_matmul,
    new_latent_pages=mla_reference.new_pages,
    write_latent=mla_reference.write_latent,
    mla_attention=mla_reference.mla_attention,
)
XLA = Kernels(
    name="xla",
    new_pages=attention_xla.new_pages,
    rope_write_kv=attention_xla.rope_write_kv,
    paged_attention=attention_xla.paged_attention,
    check_page_size=attention_xla.check_page_size,
    quantized_matmul=matmul_xla.quantized_matmul,
    grouped_matmul=grouped_xla.grouped_matmul,
    new_latent_pages=mla_xla.new_pages,
    write_latent=mla_xla.write_latent,
    mla_attention=mla_xla.mla_attention,
)


def cpu_kernels(targets: Targets) -> Kernels:
    """The registered CPU kernels: products with packed weights, attention, and a cache that only they touch."""
    return Kernels(
        name="cpu",
        new_pages=attention_cpu.new_pages,
        rope_write_kv=partial(attention_cpu.rope_write_kv, targets=targets),
        paged_attention=partial(attention_cpu.paged_attention, targets=targets),
        check_page_size=attention_cpu.check_page_size,
        quantized_matmul=partial(matmul_cpu.quantized_matmul, targets=targets),
        grouped_matmul=partial(grouped_cpu.grouped_matmul, targets=targets),
        new_latent_pages=mla_cpu.new_pages,
        write_latent=partial(mla_cpu.write_latent, targets=targets),
        mla_attention=partial(mla_cpu.mla_attention, targets=targets),
    )


def kernels_for(name: str, platform: str) -> tuple[Kernels, str]:
    """The kernels for `--kernels name` on a jax platform, and the reason in words.

    "cpu" is not among them: its kernels are built for the formats of a model, see `cpu_kernels`. Raises ValueError for
    a name that does not exist.
    """
    named = {"reference": REFERENCE, "xla": XLA}
    if name == "auto":
        if platform == "cpu":
            return XLA, "XLA's own operations in float32; --kernels cpu reads packed weights, rounding activations"
        return XLA, f"XLA's own operations: this version has no kernels of its own for {platform}"
    if name not in named:
        raise ValueError(f"unknown kernels {name!r}; choose auto, {', '.join(named)}")
    return named[name], "named by the user"
