"""An engine behind two pipes: one JSON object a line in, one a line out, until the input ends.

    {"ask": "load", "model": PATH, "num_threads": 2, "max_num_seqs": 32, "max_len": 640, "options": {}}
    {"ask": "generate", "prompts": [[1, 2], [3, 4]], "num_tokens": 64}
    {"ask": "memory"}

An answer is {"ok": {...}}, {"missing": "the package that cannot be imported"} or {"error": "why, in one line"}. Runs on
Python 3.9 and later, alone: `python exchange.py llama_cpp_engine` takes the class `Engine` of the module beside it.
An Engine has `facts`, among them "version" and "vocab_size", and `generate(prompts, num_tokens)`, which returns when
every sequence has exactly so many greedily chosen tokens. What it returns is described at `timing`.
"""

import importlib
import json
import os
import sys


def timing(start, first, end, num_tokens_at_first, num_tokens):
    """What `generate` returns, from three readings of one clock.

    first: when every sequence had its first token; num_tokens_at_first were there by then, in all sequences.
    """
    return {
        "first_token_seconds": first - start,
        "seconds": end - start,
        "num_tokens_at_first": num_tokens_at_first,
        "num_tokens": num_tokens,
    }


def answer(make_engine):
    """Answers requests on stdin until it ends. make_engine(): the class Engine; its import may take its time."""
    replies = _only_for_replies()
    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["ask"] == "load":
                _keep_to(request["num_threads"])
                engine = make_engine()(**{k: v for k, v in request.items() if k != "ask"})
            reply = {"ok": _answer(engine, request)}
        except ModuleNotFoundError as error:
            reply = {"missing": error.name or str(error)}
        except Exception as error:  # whatever an engine raises is its answer; the parent decides
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _answer(engine, request):
    if request["ask"] == "load":
        return engine.facts
    if request["ask"] == "memory":
        return resident_bytes()
    return engine.generate(request["prompts"], request["num_tokens"])


def resident_bytes():
    """{"now": ..., "peak": ...} of this process, mapped files included; "now" only where the system says it."""
    try:
        with open("/proc/self/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        names = (("now", "VmRSS"), ("peak", "VmHWM"))
        return {key: int(lines[name].split()[0]) * 1024 for key, name in names}
    except (OSError, KeyError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def _only_for_replies():
    """The real stdout. Whatever a library prints goes to stderr instead."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _keep_to(num_threads):
    """Lets this process use so many cores: engines that count cores then start so many threads, as told or not."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_threads])


def main():
    """Serves the engine named on the command line."""
    name = sys.argv[1]
    answer(lambda: importlib.import_module(name).Engine)


if __name__ == "__main__":
    main()
