"""A report with known numbers, as a table and as JSON."""

import io
import json

import pytest
from rich.console import Console

from jaxserve.bench.machine import machine_facts, model_facts
from jaxserve.bench.measure import percentiles, spread
from jaxserve.bench.report import Distribution, Figure, Report, Target, printable


def _report(**changes):
    content = {
        "title": "batching",
        "settings": {"concurrency": 32},
        "model": {"model": "tiny"},
        "machine": {"cpu": "a [b] processor"},
        "figures": (
            Figure(name="ratio", unit="x", value=spread([5.0, 3.0, 6.5]), target=Target(limit=4.0, is_floor=True)),
            Figure(name="one request", unit="tokens/s", value=spread([12345.6])),
        ),
        "distributions": (Distribution(name="TTFT", unit="ms", value=percentiles([float(i) for i in range(101)])),),
        "notes": ("read me",),
    }
    return Report(**content | changes)


def _text(report, width=160):
    out = io.StringIO()
    Console(file=out, width=width, markup=False).print(*printable(report), sep="\n")
    return [line.split() for line in out.getvalue().splitlines()]


def test_the_table_has_every_figure_with_unit_spread_and_target():
    lines = _text(_report())
    assert ["ratio", "x", "5", "3", "6.5", "3", "≥", "4", "met"] in lines
    assert ["one", "request", "tokens/s", "12,346", "12,346", "12,346", "1"] in lines
    assert ["TTFT", "ms", "50", "50", "90", "95", "99", "100", "101"] in lines


def test_the_table_says_where_the_figures_come_from():
    lines = _text(_report())
    assert lines[:4] == [["batching"], ["cpu", "a", "[b]", "processor"], ["model", "tiny"], ["concurrency", "32"]]
    assert ["note:", "read", "me"] in lines


def test_a_missed_target_is_said():
    late = Figure(name="ratio", unit="x", value=spread([0.5]), target=Target(limit=0.25, is_floor=False))
    assert ["ratio", "x", "0.5", "0.5", "0.5", "1", "≤", "0.25", "NOT", "met"] in _text(_report(figures=(late,)))


def test_without_targets_there_is_no_column_for_them():
    plain = Figure(name="ratio", unit="x", value=spread([0.5]))
    assert all("target" not in line for line in _text(_report(figures=(plain,))))


@pytest.mark.parametrize(
    ("value", "is_floor", "met"), [(4.0, True, True), (3.99, True, False), (4.0, False, True), (4.01, False, False)]
)
def test_a_target_holds_at_its_limit(value, is_floor, met):
    assert Target(limit=4.0, is_floor=is_floor).is_met(value) is met


def test_json_carries_the_same():
    content = json.loads(json.dumps(_report().as_dict()))
    ratio = {"name": "ratio", "unit": "x", "median": 5.0, "min": 3.0, "max": 6.5, "count": 3}
    assert content["figures"][0] == ratio | {"target": {"text": "≥ 4", "met": True}}
    assert content["distributions"][0] == {
        "name": "TTFT",
        "unit": "ms",
        "mean": 50.0,
        "p50": 50.0,
        "p90": 90.0,
        "p95": 95.0,
        "p99": 99.0,
        "max": 100.0,
        "count": 101,
    }
    assert (content["machine"], content["notes"]) == ({"cpu": "a [b] processor"}, ["read me"])


def test_the_machine_is_named():
    facts = machine_facts()
    assert facts["cores"] >= 1
    assert all(facts[name] for name in ("date", "cpu", "system", "python", "jaxserve", "jax", "jaxlib", "numpy"))


def test_the_model_is_named_with_what_was_chosen_for_it():
    choices = {"dtype": {"value": "float32", "reason": "cpu"}, "seed": {"value": 0, "reason": ""}}
    assert model_facts("tiny", choices) == {"model": "tiny", "dtype": "float32"}
