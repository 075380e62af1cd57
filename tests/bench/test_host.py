"""The host benchmark runs the real scheduler and input filling; its parts add up."""

import pytest

from jaxserve.bench.host import PARTS, PartClock, bench_host, host_engine
from jaxserve.bench.workload import sampling
from jaxserve.errors import ConfigError

SMALL = {"num_seqs": 3, "num_steps": 20, "num_warmup_steps": 5, "max_model_len": 128, "prompt_lengths": (4, 60)}


def test_parts_add_up_to_the_total():
    values = {d.name: d.value for d in bench_host(**SMALL).distributions}
    assert list(values) == ["total", *PARTS, "events and the rest"]
    assert {value.count for value in values.values()} == {20}
    parts = sum(value.mean for name, value in values.items() if name != "total")
    assert parts == pytest.approx(values["total"].mean)
    assert all(value.mean > 0 for value in values.values())


def test_only_the_total_has_a_target():
    report = bench_host(**SMALL)
    assert [d.name for d in report.distributions if d.target] == ["total"]
    assert report.settings["running requests"] == 3


def test_the_engine_generates_what_was_asked():
    engine, _ = host_engine(2, 256, 64, PartClock())
    for name in ("a", "b"):
        request = engine.request(name, [1, 2, 3], sampling(4), max_tokens=4, eos_token_ids=frozenset())
        engine.add(request)
    events = []
    while engine.has_work:
        events += engine.step()
    assert [e.token_ids for e in events] == [(7,)] * 8
    assert [e.finish_reason for e in events][-2:] == ["length", "length"]


@pytest.mark.parametrize("change", [{"num_seqs": 0}, {"num_steps": 0}, {"num_steps": 100}])
def test_sizes_that_cannot_run_are_refused(change):
    with pytest.raises(ConfigError, match="num-steps"):
        bench_host(**SMALL | change)
