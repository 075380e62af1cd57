"""jaxserve as one of the engines that `exchange` serves: the whole engine as its users run it, from submit to delta.

Runs in a child process; jax and the engine are imported when the model is loaded.
"""

import time
from typing import Any

from jaxserve.bench.peers.scripts.exchange import answer, timing

COMMAND = "from jaxserve.bench.peers.own_engine import main; main()"
MAX_RUNS = 20


def main() -> None:
    """Serves until stdin ends."""
    answer(lambda: Engine)


class Engine:
    """A frontend that compiles on first use, as `LLM` does. options: fields of EngineConfig, as JSON."""

    def __init__(self, model: str, num_threads: int, max_num_seqs: int, max_len: int, options: dict[str, Any]) -> None:
        import jaxserve
        from jaxserve.bench.session import vocab_size
        from jaxserve.config import EngineConfig
        from jaxserve.engine.progress import Silent
        from jaxserve.offline import start_frontend

        chosen: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": max_len} | options
        config = EngineConfig(**chosen | {"model": model, "enable_prefix_caching": False})
        self._frontend = start_frontend(config, Silent(), warm_up=False)
        choices = self._frontend.effective_config()
        shown = ("kernels", "weights", "dtype", "kv_cache_dtype", "max_num_batched_tokens")
        self.facts = {
            "version": jaxserve.__version__,
            "vocab_size": vocab_size(self._frontend),
            **{name: str(choices[name]["value"]) for name in shown if name in choices},
        }

    def generate(self, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
        """See exchange. A run in which a program was compiled is run again: requests that are submitted one after the
        other may meet in other steps each time."""
        from jaxserve.bench.errors import BenchmarkFailed

        for _ in range(MAX_RUNS):
            num_programs = len(self._frontend.programs)
            measured = self._run(prompts, num_tokens)
            if len(self._frontend.programs) == num_programs:
                return measured
        raise BenchmarkFailed(f"programs were still compiled in the {MAX_RUNS}th run of the same requests")

    def _run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
        """Deltas are read as `LLM.generate` reads them, without the text, which the peers do not make either."""
        from jaxserve.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens, detokenize=False)
        before = self._frontend.stats().generation_tokens_total
        start = time.perf_counter()
        generations = [self._frontend.submit(prompt, params) for prompt in prompts]
        readers = [iter(generation) for generation in generations]
        num_read = sum(len(next(reader).token_ids) for reader in readers)
        first = time.perf_counter()
        num_at_first = self._frontend.stats().generation_tokens_total - before
        num_read += sum(len(delta.token_ids) for reader in readers for delta in reader)
        end = time.perf_counter()
        return timing(start, first, end, num_at_first, num_read)
