"""Text on stdout and nothing else there; what was asked for and cannot be done is refused."""

import json

import pytest

from jaxserve.cli import generate as command
from jaxserve.sampling_params import SamplingParams


def test_text_on_stdout_and_the_rest_on_stderr(run, starts):
    ran = run("generate", "some-model", "--prompt", "hello", "--seed", "5")
    assert (ran.code, ran.out) == (0, "one two three four\n")
    assert starts.configs[0].model == "some-model"
    assert starts.warm_ups == [False]
    assert starts.frontend.params == [SamplingParams(temperature=0.0, seed=5, max_tokens=128)]
    assert starts.frontend.chats == [[{"role": "user", "content": "hello"}]]
    assert starts.frontend.num_closed == 1
    lines = ran.err.splitlines()
    assert lines[0].startswith("loading weights: 3 in ")
    assert "model     fake" in lines
    assert "kernels   xla: because" in lines
    assert lines[-1].startswith("prompt 5 tokens, ")
    assert " | answer 4 tokens, " in lines[-1]


def test_token_ids_instead_of_text(run, starts):
    ran = run("generate", "--prompt-token-ids", "5, 6,7", "--json")
    assert json.loads(ran.out)["prompt_token_ids"] == [5, 6, 7]
    assert json.loads(ran.out)["prompt"] is None
    assert (starts.frontend.chats, starts.frontend.prompts) == ([], [])
    run("generate", "-p", "x")
    assert starts.needs_text == [False, True]


@pytest.mark.parametrize("options", [(), ("--no-stream",)])
def test_without_a_tokenizer_ids_are_printed(run, starts, options):
    starts.frontend.tokenizer = starts.frontend.chat_template = None
    ran = run("generate", "--prompt-token-ids", "5 6", *options)
    assert (ran.code, ran.out.split()) == (0, ["0", "1", "2", "3"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give one of --prompt TEXT and --prompt-token-ids IDS"),
        (("-p", "x", "--prompt-token-ids", "1"), "give one of --prompt TEXT and --prompt-token-ids IDS"),
        (("--prompt-token-ids", "1,x"), "--prompt-token-ids '1,x': expected numbers with commas between them"),
        (("--prompt-token-ids", "-1"), "--prompt-token-ids '-1': expected numbers"),
        (("--prompt-token-ids", ","), "--prompt-token-ids ',': expected numbers"),
        (("--prompt-token-ids", "1", "--system", "s"), "leave --system and --chat out"),
    ],
)
def test_prompts_it_refuses(run, starts, options, message):
    ran = run("generate", *options)
    assert ran.code == 2
    assert message in ran.error_line()
    assert starts.configs == []


def test_the_models_sampling_defaults_apply_where_nothing_is_named(run, starts):
    starts.frontend.sampling_defaults = {"temperature": 0.6, "top_p": 0.9}
    run("generate", "-p", "x", "--top-p", "0.5", "--generation-config", "some/folder")
    assert starts.frontend.params == [SamplingParams(temperature=0.6, top_p=0.5, seed=0, max_tokens=128)]
    assert starts.configs[0].generation_config == "some/folder"


def test_text_is_written_as_it_comes(run, starts, monkeypatch):
    pieces: list[str] = []
    monkeypatch.setattr(command, "write_text", pieces.append)
    run("generate", "-p", "x")
    run("generate", "-p", "x", "--no-stream")
    assert pieces == ["one", " two", " three", " four", "\n", "one two three four\n"]


def test_the_prompt_may_come_from_stdin_without_its_last_newline(run, starts):
    run("generate", "--raw", "-p", "-", stdin="two\nlines\n")
    assert starts.frontend.prompts == ["two\nlines"]


def test_the_template_is_used_where_there_is_one(run, starts):
    run("generate", "-p", "a", "--system", "s")
    assert starts.frontend.chats == [[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]]
    starts.frontend.chat_template = None
    run("generate", "-p", "b")
    assert starts.frontend.prompts == ["b"]
    ran = run("generate", "-p", "b", "--system", "s")
    assert ran.code == 2
    assert "--system needs a chat template" in ran.error_line()


def test_json_holds_everything(run, starts):
    ran = run("generate", "-p", "hi", "--json", "-n", "2", "--logprobs", "1", "--prompt-logprobs", "1")
    result = json.loads(ran.out)
    assert result["model"] == "fake"
    assert result["prompt_token_ids"] == list(b"hi")
    assert result["prompt_logprobs"] == [None, [{"token_id": 7, "logprob": -1.0, "rank": 1, "decoded_token": "x"}]]
    assert [output["index"] for output in result["outputs"]] == [0, 1]
    first = result["outputs"][0]
    assert (first["text"], first["token_ids"]) == ("one two three four", [0, 1, 2, 3])
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", None)
    assert first["logprobs"][1] == [{"token_id": 1, "logprob": -0.5, "rank": 1, "decoded_token": " two"}]
    assert result["figures"]["num_answer_tokens"] == 8


def test_several_answers_come_whole(run, starts):
    ran = run("generate", "-p", "x", "-n", "2", "--max-tokens", "2")
    assert ran.out == "--- 1 of 2\none two\n--- 2 of 2\none two\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stream", "--json"], "--stream prints text"),
        (["--stream", "-n", "2"], "--stream shows one answer"),
        (["--logprobs", "2"], "with --json only"),
        (["--prompt-logprobs", "2"], "with --json only"),
    ],
)
def test_what_would_have_no_effect_is_refused_before_the_start(run, starts, arguments, said):
    ran = run("generate", "-p", "x", *arguments)
    assert ran.code == 2
    assert said in ran.error_line()
    assert starts.configs == []


def test_an_interrupt_ends_the_request_and_the_engine(run, starts):
    starts.frontend.interrupt_after = 2
    ran = run("generate", "-p", "x")
    assert (ran.code, ran.out) == (130, "one two")
    assert starts.frontend.generations[0].aborted.is_set()
    assert starts.frontend.num_closed == 1


def test_an_answer_that_failed_is_a_failure(run, starts):
    starts.frontend.finish_reason = "error"
    ran = run("generate", "-p", "x")
    assert ran.code == 1
    assert "no finite logits" in ran.error_line()


def test_a_prompt_that_is_too_long(run, starts):
    ran = run("generate", "-p", "x" * 100)
    assert ran.code == 2
    assert "prompt has 100 tokens" in ran.error_line()
    assert starts.frontend.num_closed == 1
