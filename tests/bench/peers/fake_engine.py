"""An engine that answers with numbers, run by `exchange` as a peer's is: `fake_engine.py EXCHANGE SCRIPT_OF_FAULTS`."""

import importlib.util
import json
import os
import sys


def exchange_at(path):
    spec = importlib.util.spec_from_file_location("exchange", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engine:
    """A turn at n sequences takes n seconds to the first tokens and `per_step` a step. Nothing waits."""

    def __init__(self, model, num_threads, max_num_seqs, max_len, options):
        self.num_turns = 0
        print("libraries print to stdout")
        os.write(1, b"and to its file descriptor\n")
        if FAULTS.get("log"):
            with open(FAULTS["log"], "a") as log:
                log.write(json.dumps({"load": [num_threads, max_num_seqs, max_len, options]}) + "\n")
        self.facts = {"version": "1.2", "vocab_size": FAULTS.get("vocab_size", 100)}

    def generate(self, prompts, num_tokens):
        self.num_turns += 1
        if FAULTS.get("log"):
            with open(FAULTS["log"], "a") as log:
                log.write(json.dumps({"name": FAULTS.get("name"), "prompts": prompts, "n": num_tokens}) + "\n")
        if self.num_turns == FAULTS.get("exit_at"):
            os.write(2, b"first\nterminate called\n")
            os._exit(3)
        if self.num_turns == FAULTS.get("raise_at"):
            raise ValueError("two\nlines")
        first = len(prompts)
        seconds = first + (num_tokens - 1) * FAULTS.get("per_step", 1.0)
        count = len(prompts) * num_tokens + FAULTS.get("extra_tokens", 0)
        return EXCHANGE.timing(0.0, first, seconds, len(prompts), count)


def make_engine():
    if FAULTS.get("missing"):
        raise ModuleNotFoundError("No module named 'absent'", name="absent")
    return Engine


if __name__ == "__main__":
    EXCHANGE = exchange_at(sys.argv[1])
    FAULTS = json.loads(sys.argv[2])
    EXCHANGE.answer(make_engine)
