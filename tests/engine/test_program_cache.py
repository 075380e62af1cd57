"""Programs from disk do what compiled ones do, nothing is traced for them, and whatever is wrong with an entry is said
and compiled anew."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest
from engines import alone, random_prompt

from jaxserve.config import EngineConfig
from jaxserve.engine import compiling, program_cache, program_keys, step
from jaxserve.engine.build import BuiltEngine, build_engine
from jaxserve.engine.program_cache import ProgramCache, evict
from jaxserve.engine.progress import Silent
from jaxserve.sampling_params import SamplingParams

TINY = Path(__file__).resolve().parent.parent / "fixtures" / "models" / "llama_untied"
LIMITS: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)


class Listening(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def traces(monkeypatch) -> Counter:
    """Counts how often a step is traced."""
    counted, unpack = Counter(), step.unpack

    def counting(*arguments):
        counted["steps"] += 1
        return unpack(*arguments)

    monkeypatch.setattr(step, "unpack", counting)
    return counted


@pytest.fixture
def folder(tmp_path):
    """A compilation cache of this test's own; the one before is JAX's again afterwards."""
    before = jax.config.jax_compilation_cache_dir
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def build(folder: Path, listener: Listening, *, warm_up: bool = True, **options) -> BuiltEngine:
    config = EngineConfig(model="tiny", compilation_cache_dir=folder, **(LIMITS | options))
    return build_engine(config, TINY, frozenset(), listener, warm_up=warm_up)


def outcome(built: BuiltEngine, num_prompt_tokens: int = 20):
    found = alone(built, random_prompt(num_prompt_tokens, 256, seed=5), SAMPLED)
    return found.token_ids, found.logprobs


def programs(folder: Path) -> list[Path]:
    return sorted((folder / "programs").glob("*.program"))


def test_a_second_start_traces_nothing_and_gives_the_same_bits(folder, traces):
    listener = Listening()
    first = build(folder, listener)
    want, num_traced = outcome(first), traces["steps"]
    assert num_traced == len(first.executor.shapes) > 2
    second = build(folder, listener)
    assert outcome(second) == want
    assert traces["steps"] == num_traced
    assert all(program.from_cache for program in second.executor.programs if program.name != "place request")
    assert [p.temp_bytes for p in second.executor.programs] == [p.temp_bytes for p in first.executor.programs]
    assert [p.name for p in second.executor.programs] == [p.name for p in first.executor.programs]
    lazy = build(folder, listener, warm_up=False)  # what LLM does
    assert outcome(lazy) == want
    assert traces["steps"] == num_traced
    assert listener.lines == []


def test_only_what_a_short_request_needs_is_loaded_at_once(folder):
    first = build(folder, Listening()).executor
    assert set(first._steps) == set(first.shapes)
    second = build(folder, Listening())
    held = set(second.executor._held)
    assert held
    assert held.isdisjoint(second.executor._steps)
    assert outcome(second, num_prompt_tokens=2)
    assert set(second.executor._held) == held
    for shape in second.executor.shapes:
        assert second.executor._step(shape)
    assert second.executor._held == {}


def test_a_loaded_step_takes_over_the_cache_it_is_given(folder):
    build(folder, Listening())
    executor = build(folder, Listening()).executor
    before = jax.tree.leaves(executor._cache)
    shape = executor.shapes[0]
    buffer = jax.numpy.zeros(step_words(shape), jax.numpy.int32)
    executor._step(shape)(executor.params, executor._cache, executor._state, buffer)
    assert all(leaf.is_deleted() for leaf in before)


def step_words(shape) -> int:
    from jaxserve.step_inputs import packing

    return packing(shape)[1]


@pytest.mark.parametrize(
    "changes", [{"max_model_len": 48}, {"num_pages": 7}, {"kv_cache_dtype": "bfloat16"}, {"kernels": "reference"}]
)
def test_another_engine_finds_nothing(folder, traces, changes):
    build(folder, Listening())
    before = traces["steps"]
    other = build(folder, Listening(), **changes)
    assert traces["steps"] == before + len(other.executor.shapes)


def test_other_sources_trace_again_and_need_no_compilation_for_the_same_program(folder, traces, monkeypatch):
    want, num_traced = outcome(build(folder, Listening())), traces["steps"]
    monkeypatch.setattr(program_keys, "_read_sources", lambda: ("edited", 0.0))
    monkeypatch.setattr(compiling, "_compiled", None)  # would be called
    again = build(folder, Listening())
    assert traces["steps"] == 2 * num_traced
    assert outcome(again) == want


def test_programs_that_only_xla_has_kept_are_made_anew(folder, traces):
    """Read from XLA's cache they have no machine code that could be kept."""
    want = outcome(build(folder, Listening()))
    for path in programs(folder):
        path.unlink()
    jax.clear_caches()
    second = build(folder, Listening())
    assert not any(program.from_cache for program in second.executor.programs)
    num_traced = traces["steps"]
    third = build(folder, Listening())
    assert traces["steps"] == num_traced
    assert outcome(third) == want


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


@pytest.mark.parametrize("damage", [cut, flipped, lambda content: b"", lambda content: b"x" * 200])
def test_a_damaged_entry_is_said_and_made_anew(folder, traces, damage):
    want, num_traced = outcome(build(folder, Listening())), traces["steps"]
    for path in programs(folder):
        path.write_bytes(damage(path.read_bytes()))
    listener = Listening()
    assert outcome(build(folder, listener)) == want
    assert len(listener.lines) >= num_traced
    assert all("is not used, it is made anew: it is" in line for line in listener.lines)
    again, before = Listening(), traces["steps"]
    build(folder, again)
    assert (again.lines, traces["steps"]) == ([], before)


def test_an_entry_under_another_key_is_refused(folder):
    build(folder, Listening())
    first, second = programs(folder)[:2]
    second.write_bytes(first.read_bytes())
    listener = Listening()
    cache = ProgramCache(folder / "programs", listener.note)
    assert cache.hold(second.stem) is None
    assert "no entry of this format and key" in listener.lines[0]


def test_what_cannot_be_loaded_is_made_anew(folder, monkeypatch):
    want = outcome(build(folder, Listening()))

    def refuse(*_: object) -> None:
        raise ValueError("no such\ntarget")

    monkeypatch.setattr(program_cache, "deserialize_and_load", refuse)
    listener = Listening()
    assert outcome(build(folder, listener)) == want
    assert listener.lines[0].endswith("cannot be loaded, it is made anew: no such target")


def test_files_are_the_users_own(folder):
    build(folder, Listening())
    assert {path.stat().st_mode & 0o777 for path in programs(folder)} == {0o600}


@pytest.mark.parametrize("change", ["owner", "mode", "link"])
def test_files_that_others_may_have_written_are_not_opened(folder, monkeypatch, change):
    build(folder, Listening())
    path = programs(folder)[0]
    if change == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if change == "mode":
        path.chmod(0o620)
    if change == "link":
        path = path.rename(path.with_suffix(".elsewhere"))
        path.with_suffix(".program").symlink_to(path)
    monkeypatch.setattr(program_cache.pickle, "loads", None)  # would be called
    listener = Listening()
    assert ProgramCache(folder / "programs", listener.note).hold(path.stem) is None
    assert len(listener.lines) == 1


def test_a_folder_that_cannot_be_written_is_said_and_harms_nothing(folder, traces):
    (folder / "programs").write_text("a file is in the way")
    listener = Listening()
    assert outcome(build(folder, listener, warm_up=False))
    assert any("are not kept on disk" in line for line in listener.lines)


def test_eviction_takes_what_was_not_used_for_longest(tmp_path):
    now = time.time()
    for name, age_days in {"a.program": 1, "b.program": 3, "c.program": 2, "old.program": 90, "x.part": 1}.items():
        (tmp_path / name).write_bytes(b"." * 100)
        os.utime(tmp_path / name, (now, now - age_days * 86400))
    evict(tmp_path, 1000, 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.program", "b.program", "c.program"]
    evict(tmp_path, 250, 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.program", "c.program"]


def test_use_counts_as_use(folder):
    build(folder, Listening())
    for path in programs(folder):
        os.utime(path, (0, 0))
    build(folder, Listening())
    assert sum(path.stat().st_mtime > 0 for path in programs(folder)) >= len(programs(folder)) - 2  # "place request"


def test_without_a_folder_nothing_is_kept(traces):
    config = EngineConfig(model="tiny", **LIMITS)
    assert build_engine(config, TINY, frozenset(), Silent(), warm_up=False).executor._program_cache is None
