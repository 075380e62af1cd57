"""Programs from disk do what compiled ones do, nothing is traced for them, and whatever is wrong with an entry is said
and compiled anew."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from engines import alone, random_prompt

from jaxserve.config import EngineConfig
from jaxserve.engine import compiling, program_cache, program_keys, step
from jaxserve.engine.build import BuiltEngine, build_engine, use_compilation_cache
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


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Iterator["First"]:
    """A first start in a folder of its own; JAX gets back the one it had."""
    before = jax.config.jax_compilation_cache_dir
    folder, listener = tmp_path_factory.mktemp("first"), Listening()
    built = build(folder, listener)
    yield First(folder=folder, built=built, outcome=outcome(built), said=listener.lines)
    if before:
        use_compilation_cache(Path(before))


@pytest.fixture
def folder(first, tmp_path):
    """What a first start leaves."""
    return Path(shutil.copytree(first.folder, tmp_path / "cache"))


@dataclass(frozen=True, kw_only=True)
class First:
    folder: Path
    built: BuiltEngine
    outcome: tuple[list[int], list[float]]
    said: list[str]


def build(folder: Path, listener: Listening, *, warm_up: bool = True, **options) -> BuiltEngine:
    config = EngineConfig(model="tiny", compilation_cache_dir=folder, **(LIMITS | options))
    return build_engine(config, TINY, frozenset(), listener, warm_up=warm_up)


def outcome(built: BuiltEngine, num_prompt_tokens: int = 20):
    found = alone(built, random_prompt(num_prompt_tokens, 256, seed=5), SAMPLED)
    return found.token_ids, found.logprobs


def programs(folder: Path) -> list[Path]:
    return sorted((folder / "programs").glob("*.program"))


def test_a_second_start_traces_nothing_and_gives_the_same_bits(first, folder, traces):
    listener = Listening()
    second = build(folder, listener)
    assert outcome(second) == first.outcome
    assert all(program.from_cache for program in second.executor.programs if program.name != "place request")
    for one, other in zip(first.built.executor.programs, second.executor.programs, strict=True):
        assert (one.name, one.temp_bytes) == (other.name, other.temp_bytes)
    lazy = build(folder, listener, warm_up=False)  # what LLM does
    assert outcome(lazy) == first.outcome
    assert traces["steps"] == 0
    assert first.said == listener.lines == []


def test_only_what_a_short_request_needs_is_loaded_at_once(first, folder):
    assert set(first.built.executor._steps) == set(first.built.executor.shapes)
    second = build(folder, Listening())
    held = set(second.executor._held)
    assert held
    assert held.isdisjoint(second.executor._steps)
    assert outcome(second, num_prompt_tokens=2)
    assert set(second.executor._held) == held
    for shape in second.executor.shapes:
        second.executor._step(shape)
    assert second.executor._held == {}


def test_a_loaded_step_takes_over_the_cache_it_is_given(folder):
    executor = build(folder, Listening()).executor
    before = jax.tree.leaves(executor._cache)
    shape = executor.shapes[0]
    buffer = jax.numpy.zeros(step_words(shape), jax.numpy.int32)
    executor._step(shape)(executor.params, executor._cache, executor._state, buffer)
    assert all(leaf.is_deleted() for leaf in before)


def step_words(shape) -> int:
    from jaxserve.step_inputs import packing

    return packing(shape)[1]


@pytest.mark.parametrize("changes", [{"max_model_len": 48}, {"num_pages": 7}, {"kernels": "reference"}])
def test_another_engine_finds_nothing(folder, traces, changes):
    other = build(folder, Listening(), warm_up=False, **changes).executor
    assert other._step(other.shapes[0])
    assert traces["steps"] == 1


def test_other_sources_trace_again_and_need_no_compilation_for_the_same_program(first, folder, traces, monkeypatch):
    monkeypatch.setattr(program_keys, "_read_sources", lambda: ("edited", 0.0))
    monkeypatch.setattr(compiling, "_compiled", None)  # would be called
    again = build(folder, Listening())
    assert traces["steps"] == len(again.executor.shapes)
    assert outcome(again) == first.outcome


def test_programs_that_only_xla_has_kept_are_made_anew(first, folder, traces):
    """Read from XLA's cache they have no machine code that could be kept."""
    for path in programs(folder):
        path.unlink()
    second = build(folder, Listening())
    assert not any(program.from_cache for program in second.executor.programs if program.name != "place request")
    num_traced = traces["steps"]
    third = build(folder, Listening())
    assert traces["steps"] == num_traced > 0
    assert outcome(third) == first.outcome


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


@pytest.mark.parametrize("damage", [cut, flipped])
def test_a_damaged_entry_is_said_and_made_anew(folder, traces, damage):
    for path in programs(folder):
        path.write_bytes(damage(path.read_bytes()))
    listener, again = Listening(), Listening()
    executor = build(folder, listener, warm_up=False).executor
    shape = executor.shapes[0]
    assert executor._step(shape)
    assert len(listener.lines) == 2  # what leads there, and the executable
    assert all("is not used, it is made anew: it is" in line for line in listener.lines)
    assert build(folder, again, warm_up=False).executor._step(shape)
    assert (again.lines, traces["steps"]) == ([], 1)


def test_an_entry_under_another_key_is_refused(folder):
    first, second = programs(folder)[:2]
    second.write_bytes(first.read_bytes())
    listener = Listening()
    cache = ProgramCache(folder / "programs", listener.note)
    assert cache.hold(second.stem) is None
    assert "no entry of this format and key" in listener.lines[0]


def test_what_cannot_be_loaded_is_made_anew(folder, monkeypatch):

    def refuse(*_: object) -> None:
        raise ValueError("no such\ntarget")

    monkeypatch.setattr(program_cache, "deserialize_and_load", refuse)
    listener = Listening()
    executor = build(folder, listener, warm_up=False).executor
    assert executor._step(executor.shapes[0])
    assert listener.lines[0].endswith("cannot be loaded, it is made anew: no such target")


def test_files_are_the_users_own(first):
    assert {path.stat().st_mode & 0o777 for path in programs(first.folder)} == {0o600}


@pytest.mark.parametrize("change", ["owner", "mode", "link"])
def test_files_that_others_may_have_written_are_not_opened(folder, monkeypatch, change):
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


def test_a_folder_that_cannot_be_written_is_said_and_harms_nothing(folder):
    shutil.rmtree(folder / "programs")
    (folder / "programs").write_text("a file is in the way")
    listener = Listening()
    executor = build(folder, listener, warm_up=False).executor
    assert executor._step(executor.shapes[0])
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


def test_an_executable_that_was_evicted_is_made_anew(folder, traces):
    for path in programs(folder):
        if path.stat().st_size > 2000:  # what leads to it is small
            path.unlink()
    listener = Listening()
    executor = build(folder, listener, warm_up=False).executor
    assert executor._step(executor.shapes[0])
    assert (listener.lines, traces["steps"]) == ([], 1)


def test_use_counts_as_use(folder):
    for path in programs(folder):
        os.utime(path, (0, 0))
    build(folder, Listening())
    assert sum(path.stat().st_mtime > 0 for path in programs(folder)) >= len(programs(folder)) - 2  # "place request"


def test_without_a_folder_nothing_is_kept(traces):
    config = EngineConfig(model="tiny", **LIMITS)
    assert build_engine(config, TINY, frozenset(), Silent(), warm_up=False).executor._program_cache is None
