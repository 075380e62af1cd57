"""`jaxserve bench serve --against` and `--peer`: our server beside another one under the same load."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxserve.bench.report import Report
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

PeerServer = Literal["llama-cpp-server"]
SPARE_TOKENS = 32  # a tokenizer may begin the text with tokens of its own


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """The other server: one that runs at a URL, or one that is started with an interpreter."""

    url: str | None
    peer: PeerServer | None
    python: str

    def __post_init__(self) -> None:
        if self.url is not None and self.peer is not None:
            raise ConfigError("--against names a running server and --peer starts one; give one of them")

    @property
    def name(self) -> str:
        """As the report calls it."""
        return self.peer or f"the server at {self.url}"


def compare_servers(
    config: EngineConfig,
    opponent: Opponent,
    work: dict[str, Any],
    load: dict[str, Any],
    *,
    arguments: Sequence[str],
    num_rounds: int,
    timeout: float,
) -> Report:
    """Starts our server in a process of its own, and the peer's, and loads them in turns.

    work: fields of Workload but its vocabulary; load: fields of Load but its address. arguments: of `jaxserve serve`.
    """
    from jaxserve.bench.against import OWN, bench_against, one_token_words, text_requests
    from jaxserve.bench.serve import Load
    from jaxserve.bench.servers import own_server
    from jaxserve.bench.workload import Workload
    from jaxserve.cli.bars import Bars
    from jaxserve.offline import find_model, read_tokenizer

    path = find_model(config.model, config.cache_dir)
    bars = Bars()
    tokenizer = read_tokenizer(path, bars)
    if tokenizer is None:
        raise ConfigError(f"{config.model} has no tokenizer, which comparing servers needs for its texts")
    words = one_token_words(tokenizer)
    plan = Workload(**work, vocab_size=tokenizer.vocab_size, seed=config.seed)
    rounds = [text_requests(tokenizer, plan.requests(n), words, config.seed + n) for n in range(num_rounds)]
    warm_up = text_requests(tokenizer, replace(plan, num_prompts=1).requests(-1), words, config.seed - 1)
    longest = max(len(r.prompt_token_ids) + r.output_len for each in (*rounds, warm_up) for r in each)
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(own_server(arguments, timeout))
        other = opponent.url or stack.enter_context(_started(opponent, path, longest + SPARE_TOKENS, timeout))
        loads = {OWN: Load(base_url=own, **load), opponent.name: Load(base_url=other, **load)}
        return bench_against(loads, rounds, warm_up, bars, plan)


def _started(opponent: Opponent, path: Any, max_len: int, timeout: float) -> Any:
    from jaxserve.bench.machine import usable_cores
    from jaxserve.bench.servers import llama_cpp_server

    sizes = {"num_threads": usable_cores(), "max_len": max_len}
    return llama_cpp_server(opponent.python, path, **sizes, timeout_seconds=timeout)
