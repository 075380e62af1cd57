"""Whole runs with fake engines: who is asked what and when, what is paired with what, and who drops out."""

import itertools
import json

import pytest
from fakes import fake_command, logged  # pyright: ignore[reportMissingImports]

from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.peers import bench
from jaxserve.bench.peers.bench import PeersSetup, bench_peers
from jaxserve.engine.progress import Silent
from jaxserve.errors import ConfigError

SMALL = {"num_rounds": 2, "batch_sizes": (1, 3), "prompt_tokens": 5, "decode_tokens": 4, "num_threads": 1}


@pytest.fixture(autouse=True)
def _bandwidth_of_one_gigabyte(monkeypatch):
    """Nothing here is about the real one, and 512 MiB are not worth reading for it."""

    class Fixed:
        def __init__(self, num_threads):
            pass

        def bytes_per_second(self):
            return 1e9

        def close(self):
            pass

    monkeypatch.setattr(bench, "ReadBandwidth", Fixed)


@pytest.fixture
def model(root_fixtures):
    return root_fixtures / "gguf" / "gguf_llama_legacy" / "model.gguf"


@pytest.fixture
def run(model):
    def start(own, *peers, **changes):
        return bench_peers(model, peers, Silent(), PeersSetup(**SMALL | changes), own=own)

    return start


def _figures(report):
    return {figure.name: figure.value for figure in report.figures}


def test_ratios_are_ours_over_the_peers(run):
    report = run(fake_command("jaxserve", per_step=0.5), fake_command("slow", per_step=2.0))
    found = _figures(report)
    assert found["decode 1: jaxserve over slow"].median == pytest.approx(4.0)
    assert found["decode 3: jaxserve over slow"].median == pytest.approx(4.0)
    assert found["prefill 5: jaxserve over slow"].median == pytest.approx(1.0)
    assert {value.count for name, value in found.items() if " over slow" in name} == {2}
    assert report.grids[0].headings == ("median tokens/s", "jaxserve", "slow")
    assert report.grids[0].rows == (("decode 1", "2", "0.5"), ("decode 3", "6", "1.5"), ("prefill 5", "5", "5"))


def test_every_engine_gets_the_same_prompts_in_turns(run, tmp_path):
    log = tmp_path / "log"
    engines = [fake_command(name, log=str(log), vocab_size=size) for name, size in (("jaxserve", 90), ("b", 50))]
    run(*engines, options={"kernels": "cpu"})
    loads, turns = logged(log)[:2], logged(log)[2:]
    assert loads == [{"load": [1, 3, 20, {"kernels": "cpu"}]}, {"load": [1, 3, 20, {}]}]
    # a round that is not counted and two that are; three kinds of work; two engines
    assert len(turns) == 3 * 3 * 2
    names = [turn["name"] for turn in turns]
    assert names == ["b", "jaxserve"] * 3 + ["jaxserve", "b"] * 3 + ["b", "jaxserve"] * 3
    for first, second in itertools.batched(turns, 2):
        assert (first["prompts"], first["n"]) == (second["prompts"], second["n"])
    prompts = [tuple(prompt) for turn in turns[::2] for prompt in turn["prompts"]]
    assert len(set(prompts)) == 3 * (1 + 3 + 1), "no prompt comes twice: a peer may cache prefixes"
    assert max(max(prompt) for prompt in prompts) < 50
    shapes = [(len(turn["prompts"]), len(turn["prompts"][0]), turn["n"]) for turn in turns[:6:2]]
    assert shapes == [(1, 16, 4), (3, 16, 4), (1, 5, 1)]


def test_missing_and_failing_peers_are_named_and_stop_nothing(run):
    report = run(
        fake_command("jaxserve"),
        fake_command("absent", missing=True),
        fake_command("broken", raise_at=5),
        fake_command("wrong", extra_tokens=1),
        fake_command("fine"),
    )
    states = {row[0]: row[-1] for row in report.grids[1].rows}
    assert states["absent"] == "not installed: pip install some-package"
    assert states["broken"] == "ValueError: two lines"
    assert states["wrong"] == "decode 1: 5 tokens instead of 4"
    assert report.grids[0].headings == ("median tokens/s", "jaxserve", "fine")
    assert {name.rpartition(" ")[2] for name in _figures(report) if ": jaxserve over" in name} == {"fine"}
    assert set(report.samples["tokens_per_second"]) == {"jaxserve", "fine"}
    assert report.samples["engines"]["broken"]["reason"] == "ValueError: two lines"


@pytest.mark.parametrize("faults", [{"missing": True}, {"exit_at": 7}])
def test_without_our_own_engine_there_is_no_report(run, faults):
    with pytest.raises(BenchmarkFailed, match="jaxserve gave no figures: "):
        run(fake_command("jaxserve", **faults), fake_command("fine"))


def test_without_peers_the_floor_is_still_told(run, model):
    found = _figures(run(fake_command("jaxserve")))
    step = found["shortest decode step it allows"].median / 1e3
    assert found["read bandwidth"].median == pytest.approx(1.0)
    assert 0 < step * 1e9 < model.stat().st_size
    assert found["decode 1 over that bound: jaxserve"].median == pytest.approx(1.0 * step)


def test_json_carries_single_rounds_and_engines(run):
    content = json.loads(json.dumps(run(fake_command("jaxserve"), fake_command("b")).as_dict()))
    assert content["samples"]["tokens_per_second"]["b"] == {
        "decode 1": [1.0, 1.0],
        "decode 3": [3.0, 3.0],
        "prefill 5": [5.0, 5.0],
    }
    assert content["samples"]["read_bytes_per_second"] == [1e9, 1e9]
    assert content["samples"]["engines"]["b"]["facts"] == {"version": "1.2", "vocab_size": 100}
    assert content["samples"]["engines"]["b"]["resident_bytes_at_end"]["peak"] > 1_000_000
    assert content["grids"][1]["rows"][0]["engine"] == "jaxserve"
    assert content["settings"]["rounds"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sizes": ()}, "--batch-sizes"),
        ({"batch_sizes": (0,)}, "--batch-sizes"),
        ({"batch_sizes": (1, 1)}, "--batch-sizes"),
        ({"decode_tokens": 1}, "--decode-tokens"),
        ({"num_threads": 0}, "--threads"),
        ({"num_threads": 10_000}, "--threads must be 1 to"),
        ({"options": {"max_num_seqs": 2}}, "--max-num-seqs must hold the largest batch, 3"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        PeersSetup(**SMALL | change)


def test_a_folder_is_no_file_for_peers(tmp_path):
    with pytest.raises(ConfigError, match="GGUF"):
        bench_peers(tmp_path, [], Silent(), PeersSetup(**SMALL))
