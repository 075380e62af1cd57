"""`jaxserve bench experts`: what dealing experts out to devices costs."""

import os
from typing import Annotated, Literal

import typer

COUNT_FLAG = "--xla_force_host_platform_device_count"


def experts(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 512,
    num_experts: Annotated[int, typer.Option("--experts", min=1, help="Experts of the layer.")] = 32,
    chosen: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 4,
    hidden_size: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 512,
    expert_size: Annotated[int, typer.Option(min=1, help="Width of an expert.")] = 512,
    devices: Annotated[int, typer.Option(min=2, help="Devices; on a CPU as many virtual ones are made.")] = 2,
    over: Annotated[
        Literal["expert", "data"], typer.Option(help="Every device has all tokens, or each its own.")
    ] = "expert",
    num_rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which all runs take turns.")] = 20,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """One layer of a mixture over several devices against one device, with the bytes and time of the exchange."""
    flags = os.environ.get("XLA_FLAGS", "")
    if COUNT_FLAG not in flags:  # before jax looks
        os.environ["XLA_FLAGS"] = f"{flags} {COUNT_FLAG}={devices}".strip()
    from jaxserve.bench.experts import ExpertsSetup, bench_experts
    from jaxserve.cli.bars import Bars
    from jaxserve.cli.bench import show
    from jaxserve.errors import ConfigError

    if chosen > num_experts:
        raise ConfigError(f"--chosen {chosen} of --experts {num_experts}: a token cannot choose more than there are")
    setup = ExpertsSetup(
        num_tokens=tokens, num_experts=num_experts, num_chosen=chosen, hidden_size=hidden_size,
        expert_size=expert_size, num_devices=devices, kind=over,
    )  # fmt: skip
    show([bench_experts(setup, num_rounds, Bars())], json_)
