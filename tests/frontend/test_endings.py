"""Every way a request ends but its own: abort, drain, close, a dead engine, logits that are no numbers."""

import threading

import pytest
from readers import ends_of, is_at_rest, read, read_async, tokens_of, wait_until
from scripted import ScriptedExecutor, hashed, hashed_token

from jaxserve.errors import EngineDied
from jaxserve.sampling_params import SamplingParams

PROMPT = [72, 73, 74]
LONG = SamplingParams(max_tokens=90)
FEW = SamplingParams(max_tokens=3)


@pytest.fixture
def executor():
    return ScriptedExecutor()


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def frontend(frontend_over, executor, request):
    return frontend_over(executor, max_num_seqs=2, overlap=request.param)


def hold_in_step(executor, frontend):
    """A request in a step that waits at the gate, so that what follows queues up behind it."""
    executor.gate.clear()
    generation = frontend.submit(PROMPT, LONG)
    assert executor.arrived.acquire(timeout=30)
    return generation


@pytest.mark.parametrize("reader", [read, read_async])
def test_abort_while_running(frontend, executor, reader):
    generation = hold_in_step(executor, frontend)
    generation.abort()
    executor.gate.set()
    deltas = reader(generation)
    assert ends_of(deltas) == {0: "abort"}
    assert len(tokens_of(deltas)) < 90
    wait_until(lambda: is_at_rest(frontend))


def test_abort_before_the_engine_saw_it(frontend, executor):
    first = hold_in_step(executor, frontend)
    second = frontend.submit([80], LONG)
    second.abort()
    first.abort()
    executor.gate.set()
    assert [(d.token_ids, d.finish_reason) for d in read(second)] == [((), "abort")]
    assert ends_of(read(first)) == {0: "abort"}
    assert not any(r.request_id.startswith(second.request_id) for plan in executor.plans for r in plan.requests)
    wait_until(lambda: is_at_rest(frontend))


def test_abort_while_waiting_for_a_slot(frontend, executor):
    running = [hold_in_step(executor, frontend), frontend.submit([80], LONG)]
    waiting = frontend.submit([81], LONG)
    executor.gate.set()
    wait_until(lambda: frontend.stats().num_waiting == 1)
    waiting.abort()
    assert ends_of(read(waiting)) == {0: "abort"}
    for generation in running:
        read(generation)
    wait_until(lambda: is_at_rest(frontend))


def test_abort_ends_every_choice_and_twice_is_once(frontend, executor):
    executor.gate.clear()
    generation = frontend.submit(PROMPT, SamplingParams(n=5, max_tokens=90))
    assert executor.arrived.acquire(timeout=30)
    generation.abort()
    generation.abort()
    executor.gate.set()
    assert ends_of(read(generation)) == dict.fromkeys(range(5), "abort")
    generation.abort()
    wait_until(lambda: is_at_rest(frontend))
    assert frontend.stats().requests_finished_total == {"stop": 0, "length": 0, "abort": 5, "error": 0}


def test_abort_after_the_end_changes_nothing(frontend):
    generation = frontend.submit(PROMPT, FEW)
    assert ends_of(read(generation)) == {0: "length"}
    generation.abort()
    assert ends_of(read(frontend.submit(PROMPT, FEW))) == {0: "length"}
    assert frontend.stats().requests_finished_total["abort"] == 0


def test_the_neighbours_of_an_aborted_request_do_not_notice(frontend, executor):
    aborted = hold_in_step(executor, frontend)
    other = frontend.submit([90, 91], SamplingParams(max_tokens=30))
    aborted.abort()
    executor.gate.set()
    assert tokens_of(read(other)) == [hashed_token([90, 91], 0, n) for n in range(30)]


def test_drain_waits_for_the_open_ones(frontend, executor):
    generation = hold_in_step(executor, frontend)
    assert frontend.drain(0.02) is False
    executor.gate.set()
    assert frontend.drain(30.0) is True
    assert ends_of(read(generation)) == {0: "length"}


def test_close_ends_every_reader_with_abort(frontend, executor):
    generations = [hold_in_step(executor, frontend), *(frontend.submit([n], LONG) for n in range(4))]
    closing = threading.Thread(target=frontend.close)
    closing.start()
    executor.gate.set()
    for number, generation in enumerate(generations):
        assert ends_of((read if number % 2 else read_async)(generation)) == {0: "abort"}
    closing.join(30)
    assert not closing.is_alive()
    frontend.close()


def test_a_frontend_closes_behind_a_with_block(frontend_over, executor):
    with frontend_over(executor) as frontend:
        read(frontend.submit(PROMPT, FEW))
    assert executor.num_closes == 1
    assert not frontend.is_ready


def test_everybody_hears_that_the_engine_died(frontend, executor):
    generations = [hold_in_step(executor, frontend), *(frontend.submit([n], LONG) for n in range(5))]
    heard: list[Exception] = []

    def listen(generation, reader):
        with pytest.raises(EngineDied, match="RuntimeError: chip on fire") as caught:
            reader(generation)
        heard.append(caught.value)

    readers = [
        threading.Thread(target=listen, args=(generation, read if number % 2 else read_async))
        for number, generation in enumerate(generations)
    ]
    for thread in readers:
        thread.start()
    executor.failure = RuntimeError("chip on fire")
    executor.gate.set()
    for thread in readers:
        thread.join(30)
    assert len(heard) == 6
    assert all(isinstance(error.__cause__, RuntimeError) for error in heard)
    assert isinstance(frontend.failure, RuntimeError)
    assert frontend.drain(0.0)


def test_logits_that_are_no_numbers_end_that_request_only(frontend_over):
    executor = ScriptedExecutor(lambda r, n: -1 if r.prompt_token_ids == [66] and n == 2 else hashed(r, n))
    for overlap in (True, False):
        frontend = frontend_over(executor if overlap else ScriptedExecutor(executor.script), overlap=overlap)
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        bad = frontend.submit([66], SamplingParams(max_tokens=60, ignore_eos=True))
        good = frontend.submit([67], params)
        deltas = read(bad)
        assert ends_of(deltas) == {0: "error"}
        assert tokens_of(deltas) == [hashed_token([66], 0, n) for n in range(2)]
        assert tokens_of(read(good)) == [hashed_token([67], 0, n) for n in range(10)]
        assert frontend.stats().requests_finished_total["error"] == 1
        wait_until(lambda frontend=frontend: is_at_rest(frontend))
        assert frontend.is_ready
        assert frontend.stats().steps_total < 20  # the engine does not go on with it


def test_no_numbers_at_the_last_token_allowed_is_an_error_too(frontend_over):
    frontend = frontend_over(ScriptedExecutor(lambda request, n: -1))
    assert ends_of(read(frontend.submit(PROMPT, SamplingParams(max_tokens=1)))) == {0: "error"}
