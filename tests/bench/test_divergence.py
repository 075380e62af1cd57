"""Divergences against a plain definition, windows of text, and the real model within the project's bound."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench.divergence import DivergenceSetup, bench_divergence, kl_nats, own_texts, token_windows
from jaxserve.cli.main import run_command
from jaxserve.config import EngineConfig
from jaxserve.engine.progress import Silent
from jaxserve.errors import ConfigError

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
LEGACY = FIXTURES / "gguf" / "gguf_llama_legacy" / "model.gguf"


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


def _setup(**changes):
    sizes: dict[str, Any] = {"texts": {"a": "abc", "b": "defgh"}, "max_tokens": 100, "window": 4, "chunk": 2}
    return DivergenceSetup(**sizes | changes)


def _windows(**changes):
    found = token_windows(Letters(), _setup(**changes))
    return ["".join(map(chr, window)) for window in found]


def test_the_divergence_is_its_definition():
    rng = np.random.default_rng(0)
    p, q = rng.standard_normal((2, 3, 50)).astype(np.float32) * 4
    p[0, 3] = 90.0  # exp overflows float32 here
    want = []
    for a, b in zip(p.astype(np.float64), q.astype(np.float64), strict=True):
        pa, pb = np.exp(a) / np.exp(a).sum(), np.exp(b) / np.exp(b).sum()
        want.append((pa * np.log(pa / pb)).sum())
    np.testing.assert_allclose(kl_nats(p, q), want, rtol=1e-9)
    assert (np.asarray(want) > 0).all()
    assert (kl_nats(p, p) == 0).all()


def test_texts_follow_each_other_in_whole_chunks():
    assert _windows() == ["abc\n", "\ndef", "gh"]
    assert _windows(max_tokens=7) == ["abc\n", "\nd"]
    assert _windows(chunk=4) == ["abc\n", "\ndef"]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ConfigError, match="do not fill one --chunk of 16"):
        _windows(window=16, chunk=16)
    with pytest.raises(ConfigError, match="--window must be a multiple"):
        _setup(window=3)
    with pytest.raises(ConfigError, match="both xla"):
        bench_divergence(EngineConfig(model=str(LEGACY), kernels="xla"), Silent(), _setup())


def test_our_own_texts_are_there():
    assert sum(map(len, own_texts().values())) > 10_000


@pytest.mark.parametrize("chunk", [1, 8])
def test_two_definitions_of_one_model_hardly_differ(monkeypatch, capsys, chunk):
    """The command on a tiny model without a tokenizer of its own: reference operations against XLA's."""
    monkeypatch.setattr("jaxserve.bench.divergence.read_tokenizer", lambda path, progress: Letters())
    cache = ["--compilation-cache-dir", os.environ["JAX_COMPILATION_CACHE_DIR"]]
    sizes = ["--max-tokens", "16", "--window", "8", "--chunk", str(chunk)]
    arguments = [str(LEGACY), "--kernels", "reference", *sizes, *cache, "--json"]
    assert run_command(["bench", "divergence", *arguments]) == 0
    content = json.loads(capsys.readouterr().out)
    figures = {figure["name"]: figure["median"] for figure in content["figures"]}
    assert content["settings"]["tokens"] == 16
    assert figures["same likeliest token"] == 1.0
    # float32 logits of order 1, summed in another order: 1e-6 apart, and the divergence is of second order in that
    assert abs(figures["mean KL(reference || other)"]) < 1e-9


def test_a_text_that_cannot_be_read_is_one_line(capsys):
    assert run_command(["bench", "divergence", "--text", "nowhere.txt"]) == 2
    assert "--text nowhere.txt: No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_cpu_kernels_stay_within_a_hundredth_of_a_nat(smollm2_path):
    """Activations rounded to 8 bits; measured: 0.004 on average, 0.02 at most."""
    cases = json.loads((FIXTURES / "smollm2" / "cases.json").read_text())["cases"]
    texts = {f"case {i}": f"{case['text'] or ''}{case['greedy_text']}" for i, case in enumerate(cases)}
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    config = EngineConfig(model=str(smollm2_path), kernels="cpu", compilation_cache_dir=cache)
    setup = DivergenceSetup(texts=texts | own_texts(), max_tokens=1024)
    report = bench_divergence(config, Silent(), setup)
    figures = {figure.name: figure for figure in report.figures}
    mean = figures["mean KL(reference || other)"]
    assert mean.target is not None
    assert mean.target.is_met(mean.value.median)
    assert 0 < figures["largest KL of a position"].value.median < 0.2
    assert figures["same likeliest token"].value.median > 0.95
