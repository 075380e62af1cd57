"""Many callers at once, and several frontends in one process."""

import threading

import pytest
from readers import is_at_rest, read, read_async, tokens_of, wait_until
from scripted import ScriptedExecutor, hashed_token

from jaxserve.errors import EngineDied, InvalidRequest, ShuttingDown
from jaxserve.sampling_params import SamplingParams


def in_threads(count, work):
    """Runs work(number) in as many threads; an error in any of them fails the test."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a reader waits for ever"
    if errors:
        raise errors[0]


def test_two_hundred_requests_from_eight_threads_get_their_own_tokens(frontend_over):
    frontend = frontend_over(ScriptedExecutor(), max_open=500, num_pages=24)

    def submit_and_read(thread: int) -> None:
        prompts = [[thread, number, number % 7] for number in range(25)]
        generations = [frontend.submit(p, SamplingParams(max_tokens=9, ignore_eos=True, n=1)) for p in prompts]
        for number, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
            deltas = (read if number % 2 else read_async)(generation)
            assert tokens_of(deltas) == [hashed_token(prompt, 0, n) for n in range(9)]

    in_threads(8, submit_and_read)
    stats = frontend.stats()
    assert stats.requests_finished_total["length"] == 200
    assert stats.prompt_tokens_total == 600
    assert stats.generation_tokens_total == 1800
    wait_until(lambda: is_at_rest(frontend))


def test_aborts_from_many_threads_leave_nothing_behind(frontend_over):
    frontend = frontend_over(ScriptedExecutor(), max_open=500)

    def submit_and_abort(thread: int) -> None:
        for number in range(20):
            generation = frontend.submit([thread, number], SamplingParams(max_tokens=50, ignore_eos=True))
            deltas = []
            for delta in generation:
                deltas.append(delta)
                if len(deltas) == number % 4:
                    generation.abort()
            if number % 4 == 0:
                generation.abort()
            tokens = tokens_of(deltas)
            assert tokens == [hashed_token([thread, number], 0, n) for n in range(len(tokens))]

    in_threads(6, submit_and_abort)
    wait_until(lambda: is_at_rest(frontend))
    assert sum(frontend.stats().requests_finished_total.values()) == 120


@pytest.mark.parametrize("ending", ["close", "death"])
def test_nobody_who_submits_during_the_end_waits_for_ever(frontend_over, ending):
    for _ in range(10):
        frontend = frontend_over(executor := ScriptedExecutor(), max_open=10_000)
        begun = threading.Barrier(5)

        def submit_and_read(number: int, frontend=frontend, begun=begun, executor=executor) -> None:
            begun.wait(30)
            if number == 4:
                if ending == "death":
                    executor.failure = RuntimeError("chip on fire")
                else:
                    frontend.close()
                return
            try:
                for _ in range(20):
                    read(frontend.submit([number], SamplingParams(max_tokens=2)))
            except (ShuttingDown, EngineDied):
                pass

        in_threads(5, submit_and_read)
        frontend.close()


def test_the_same_id_from_many_threads_serves_one_at_a_time(frontend_over):
    frontend = frontend_over(ScriptedExecutor())
    served = []

    def submit_and_read(thread: int) -> None:
        for _ in range(10):
            try:
                tokens = tokens_of(read(frontend.submit([thread], SamplingParams(max_tokens=4), request_id="same")))
            except InvalidRequest:
                continue
            assert tokens == [hashed_token([thread], 0, n) for n in range(4)]
            served.append(thread)

    in_threads(4, submit_and_read)
    assert served
    wait_until(lambda: is_at_rest(frontend))


def test_two_frontends_do_not_know_each_other(frontend_over):
    first = frontend_over(ScriptedExecutor(lambda request, n: 65))
    second = frontend_over(ScriptedExecutor(lambda request, n: 66))
    params = SamplingParams(max_tokens=3)
    generations = [f.submit([1, 2], params, request_id="r") for f in (first, second)]
    assert [tokens_of(read(g)) for g in generations] == [[65] * 3, [66] * 3]
    first.close()
    assert tokens_of(read(second.submit([1, 2], params))) == [66] * 3
