"""Frontends over a scripted executor and a real scheduler, with a small byte-level tokenizer."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted import EOS, VOCABULARY, ScriptedExecutor

from jaxserve.engine.engine import Engine
from jaxserve.frontend import Frontend, ServedModel
from jaxserve.scheduler import Scheduler
from jaxserve.tokens import Tokenizer, load_tokenizer_from_gguf
from jaxserve.tokens.token_table import byte_level_alphabet

LIMITS = {"num_pages": 64, "page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """All 256 bytes as ids 0 to 255, "he" and "hel", four control tokens; ends at EOS and 261."""
    alphabet = byte_level_alphabet()
    tokens = [*sorted(alphabet, key=alphabet.__getitem__), "he", "hel", "<s>", "<|im_start|>", "<|im_end|>", "<|eot|>"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 258 + [3] * 4,
        "merges": ["h e", "he l"],
        "bos_token_id": 258,
        "eos_token_id": EOS,
        "eot_token_id": 261,
        "add_bos_token": True,
    }
    return load_tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


MakeFrontend = Callable[..., Frontend]


@pytest.fixture
def frontend_over(tokenizer: Tokenizer) -> Iterator[MakeFrontend]:
    """Makes frontends; afterwards each is closed and every page, slot and open request must be accounted for."""
    made: list[tuple[Frontend, ScriptedExecutor]] = []

    def make(executor: ScriptedExecutor, *, max_open: int = 100, text: bool = True, **limits: Any) -> Frontend:
        overlap = limits.pop("overlap", True)
        options: Any = LIMITS | limits
        model = ServedModel(
            name="scripted",
            version="1",
            max_model_len=options["max_model_len"],
            vocab_size=VOCABULARY,
            eos_token_ids=frozenset({EOS, 261}),
            tokenizer=tokenizer if text else None,
            chat_template=None,
        )
        engine = Engine(Scheduler(**options), executor, overlap=overlap, seed=0)
        made.append((Frontend(engine, model, max_open=max_open), executor))
        return made[-1][0]

    yield make
    for frontend, executor in made:
        executor.gate.set()
        frontend.close()
        assert executor.num_closes == 1
        if frontend.failure is None:
            assert frontend.drain(0.0)
            frontend.engine.scheduler.check_invariants()
