"""An engine in a child answers over pipes, and each way of not answering is one line."""

import sys
import time

import pytest
from fakes import fake_command  # pyright: ignore[reportMissingImports]

from jaxserve.bench.peers.engines import PEERS, EngineCommand, EngineProcess, EngineUnusable, peer_commands
from jaxserve.errors import ConfigError

LOAD = {"model": "m.gguf", "num_threads": 1, "max_num_seqs": 2, "max_len": 9, "options": {}}


@pytest.fixture
def started():
    open_processes = []

    def start(command):
        open_processes.append(EngineProcess(command))
        return open_processes[-1]

    yield start
    for process in open_processes:
        process.close()


def test_what_libraries_print_does_not_disturb_the_answers(started):
    process = started(fake_command("a"))
    assert process.ask("load", 30.0, **LOAD) == {"version": "1.2", "vocab_size": 100}
    answer = process.ask("generate", 30.0, prompts=[[1], [2]], num_tokens=4)
    assert answer == {"first_token_seconds": 2.0, "seconds": 5.0, "num_tokens_at_first": 2, "num_tokens": 8}
    assert process.ask("memory", 30.0)["peak"] > 1_000_000


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"missing": True}, "not installed: pip install some-package"),
        ({"raise_at": 1}, "ValueError: two lines"),
        ({"exit_at": 1}, "its process ended with 3 at 'generate': terminate called"),
    ],
)
def test_each_failure_is_a_reason(started, faults, reason):
    process = started(fake_command("a", **faults))

    def ask():
        process.ask("load", 30.0, **LOAD)
        process.ask("generate", 30.0, prompts=[[1]], num_tokens=1)

    with pytest.raises(EngineUnusable) as caught:
        ask()
    assert str(caught.value) == reason


def test_a_missing_module_without_a_known_package_is_named(started):
    process = started(fake_command("a", packages="", missing=True))
    with pytest.raises(EngineUnusable, match=r"^not installed \(no module absent\)$"):
        process.ask("load", 30.0, **LOAD)


def test_an_interpreter_that_is_not_there_is_a_reason():
    with pytest.raises(EngineUnusable, match="nowhere/python: No such file"):
        EngineProcess(EngineCommand(name="a", command=("nowhere/python", "x")))


def test_an_engine_that_never_answers_is_given_up(started):
    waiting = (sys.executable, "-c", "import time; time.sleep(600)")
    process = started(EngineCommand(name="a", command=waiting))
    with pytest.raises(EngineUnusable, match=r"^no answer to 'load' in 0\.2 s$"):
        process.ask("load", 0.2, **LOAD)
    with pytest.raises(EngineUnusable, match="closed"):
        process.ask("load", 0.2, **LOAD)


def test_an_engine_that_ended_at_once_is_a_reason(started):
    process = started(EngineCommand(name="a", command=(sys.executable, "-c", "raise SystemExit('no')")))
    with pytest.raises(EngineUnusable, match=r"ended with 1 at 'load': no$"):
        process.ask("load", 30.0, **LOAD)


def test_processor_time_is_seen(started):
    busy = "import sys, time\nfor line in sys.stdin:\n    until = time.process_time() + 0.3\n"
    busy += "    while time.process_time() < until: pass\n    print('{\"ok\": {}}', flush=True)"
    process = started(EngineCommand(name="a", command=(sys.executable, "-c", busy)))
    before = process.cpu_seconds()
    if before is None:
        pytest.skip("this system does not say what a process has used")
    process.ask("load", 30.0)
    assert process.cpu_seconds() >= before + 0.2
    process.close()
    assert process.cpu_seconds() is None


def test_closing_leaves_no_process(started):
    process = started(fake_command("a"))
    process.ask("load", 30.0, **LOAD)
    start = time.perf_counter()
    process.close()
    process.close()
    assert time.perf_counter() - start < 30


def test_peers_get_their_interpreters():
    llama, other = peer_commands(["llama.cpp", "transformers"], {"llama.cpp": "venv/bin/python"})
    assert llama.command[0] == "venv/bin/python"
    assert llama.command[1:] == (*other.command[1:2], PEERS["llama.cpp"].module)
    assert (other.command[0], other.packages) == (sys.executable, "transformers torch gguf accelerate")


@pytest.mark.parametrize(
    ("names", "pythons", "message"),
    [
        (["vllm"], {}, "no peer 'vllm'; there are llama.cpp, openvino, transformers"),
        (["openvino"], {"torch": "python"}, "no peer 'torch'"),
        (["openvino"], {"llama.cpp": "python"}, "names llama.cpp, which --peers leaves out"),
    ],
)
def test_peers_that_are_not_known_are_refused(names, pythons, message):
    with pytest.raises(ConfigError, match=message):
        peer_commands(names, pythons)
