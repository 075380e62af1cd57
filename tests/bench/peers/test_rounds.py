"""Rates from timings, the order of turns, and who is busy while others have their turn."""

import pytest

from jaxserve.bench.peers import rounds
from jaxserve.bench.peers.engines import EngineCommand
from jaxserve.bench.peers.rounds import Contestant, ForeignLoad, Work, all_work, rotated, turn


class Counted:
    """A process that answers with one timing and has used so much processor time, more at each look."""

    def __init__(self, per_look):
        self.per_look, self.seconds = per_look, 0.0

    def cpu_seconds(self):
        self.seconds += self.per_look
        return self.seconds

    def ask(self, what, timeout_seconds, **content):
        count = len(content["prompts"]) * content["num_tokens"]
        return {"first_token_seconds": 1.0, "seconds": 3.0, "num_tokens_at_first": 1, "num_tokens": count}

    def close(self):
        pass


def _engine(name, per_look):
    engine = Contestant(name=name, command=EngineCommand(name=name, command=("none",)))
    engine.process = Counted(per_look)  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def test_decode_counts_what_comes_after_the_first_tokens():
    work = Work(name="decode 2", num_seqs=2, prompt_len=16, num_tokens=10)
    timing = {"first_token_seconds": 1.0, "seconds": 5.0, "num_tokens_at_first": 4, "num_tokens": 20}
    assert work.tokens_per_second(timing) == 4.0


def test_prefill_counts_prompt_tokens_to_the_first_token():
    work = Work(name="prefill 30", num_seqs=1, prompt_len=30, num_tokens=1)
    timing = {"first_token_seconds": 0.5, "seconds": 0.6, "num_tokens_at_first": 1, "num_tokens": 1}
    assert work.tokens_per_second(timing) == 60.0


def test_the_work_is_every_batch_size_and_a_prefill():
    found = [(w.name, w.num_seqs, w.prompt_len, w.num_tokens) for w in all_work((1, 8), 16, 64, 512)]
    assert found == [("decode 1", 1, 16, 64), ("decode 8", 8, 16, 64), ("prefill 512", 1, 512, 1)]


def test_prompts_depend_on_seed_work_and_round():
    one, other = all_work((1, 2), 16, 64, 512)[:2]
    assert one.prompts(50, 0, 3) == one.prompts(50, 0, 3)
    different = [one.prompts(50, 0, 3), one.prompts(50, 0, 4), one.prompts(50, 1, 3), other.prompts(50, 0, 3)[:1]]
    assert len({tuple(prompts[0]) for prompts in different}) == 4


def test_another_one_begins_each_round():
    assert [rotated(3, number) for number in (-1, 0, 1, 2)] == [[2, 0, 1], [0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_processor_time_of_those_who_wait_is_noted():
    engines = [_engine("a", 0.0), _engine("b", 0.25), _engine("c", 0.0)]
    engines[2].process = None
    times = iter([10.0, 15.0])
    work = Work(name="decode 1", num_seqs=1, prompt_len=2, num_tokens=3)
    limits = {"is_counted": True, "timeout_seconds": 1.0}
    turn(engines, 0, work, [[1, 2]], **limits, clock=lambda: next(times))
    assert engines[0].rates == {"decode 1": [1.0]}
    assert (engines[0].idle_share, engines[1].idle_share, engines[2].idle_share) == (None, 0.05, None)


def test_what_is_neither_ours_nor_an_engines_is_foreign(monkeypatch):
    whole = iter([100.0, 112.0])
    monkeypatch.setattr(rounds, "machine_cpu_seconds", lambda: next(whole))
    monkeypatch.setattr(rounds.time, "process_time", iter([1.0, 2.0]).__next__)
    monkeypatch.setattr(rounds.time, "perf_counter", iter([0.0, 10.0]).__next__)
    load = ForeignLoad([_engine("a", 1.0)])
    assert load.cores() == pytest.approx((12.0 - 1.0 - 1.0) / 10.0)


def test_an_engine_that_ended_meanwhile_makes_the_foreign_load_unknown():
    engines = [_engine("a", 0.0), _engine("b", 0.0)]
    load = ForeignLoad(engines)
    engines[1].process = None
    assert load.cores() is None
