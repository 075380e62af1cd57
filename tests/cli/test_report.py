"""Rates count the tokens and the seconds they are about, and compilation apart."""

from dataclasses import dataclass

import pytest

from jaxserve.cli.report import GenerationClock, choice_lines, programs_line, startup_lines
from jaxserve.outputs import TextDelta


@dataclass(frozen=True)
class Compiled:
    seconds: float
    name: str = "step"
    from_cache: bool = False
    temp_bytes: int = 0


def _delta(*token_ids: int) -> TextDelta:
    return TextDelta(index=0, text="", token_ids=token_ids)


def test_compilation_is_in_no_rate():
    now, programs = [100.0], [Compiled(9.0)]
    clock = GenerationClock(programs, clock=lambda: now[0])
    now[0] = 103.0
    programs.append(Compiled(2.0))
    clock.saw(_delta())  # text held back: no token yet
    clock.saw(_delta(1))
    now[0] = 108.0
    programs.append(Compiled(1.0))
    clock.saw(_delta(2, 3))
    clock.saw(_delta(4, 5))
    figures = clock.figures(num_prompt_tokens=30, num_cached_tokens=10, startup_seconds=0.25)
    assert (figures.first_token_seconds, figures.prefill_seconds) == (3.0, 1.0)
    assert (figures.num_answer_tokens, figures.num_decoded_tokens, figures.decode_seconds) == (5, 4, 4.0)
    assert figures.compile_seconds == 3.0
    assert figures.line() == (
        "prompt 30 tokens (10 cached), 20.0 tok/s | answer 5 tokens, 1.0 tok/s | first token after 3.00 s | "
        "compiling 3.00 s (not in the rates) | startup 0.2 s"
    )


def test_nothing_generated_has_no_rate():
    clock = GenerationClock([], clock=lambda: 1.0)
    figures = clock.figures(num_prompt_tokens=3, num_cached_tokens=0, startup_seconds=1.0)
    assert figures.line() == (
        "prompt 3 tokens, - tok/s | answer 0 tokens, - tok/s | first token after 0.00 s | startup 1.0 s"
    )


def test_programs_in_one_line():
    assert programs_line([]) == "compiled on first use"
    programs = [Compiled(1.5), Compiled(0.5, from_cache=True)]
    assert programs_line(programs) == "2, 2.0 s of compiling added up, 1 of them from the compilation cache"


def test_every_choice_is_shown_with_its_reason():
    choices = {"seed": {"value": 0, "reason": "--seed"}, "shapes": {"value": ["1x2", "3x4"], "reason": ""}}
    assert choice_lines(choices) == ["seed    0: --seed", "shapes  1x2, 3x4"]
    assert choice_lines({}) == []


@pytest.mark.parametrize("name", ["device", "weights", "kernels", "kv_pages"])
def test_the_short_report_has_the_choices_that_matter(name):
    lines = startup_lines(
        "m", {name: {"value": "v", "reason": "r"}, "seed": {"value": 0, "reason": ""}}, [], 1.25, None
    )
    assert f"{name.replace('_', ' '):<9} v: r" in lines
    assert not any("seed" in line for line in lines)


def test_the_short_report_describes_the_file(smollm2_path):
    from checkpoints.inspect import describe

    lines = startup_lines("m", {}, [], 1.25, describe(smollm2_path))
    assert lines[0] == "model     m: llama, 134,515,008 parameters"
    assert "98,362,432 bytes (Q4_1 66,355,200, Q8_0 30,081,024, F32 140,544)" in lines[1]
    assert lines[-1] == "started   in 1.2 s"


def test_a_models_sampling_defaults_are_in_the_short_report():
    choices = {"sampling_defaults": {"value": {"temperature": 0.6, "top_k": 20}, "reason": "from the model"}}
    assert "sampling  temperature 0.6, top_k 20: from the model" in startup_lines("m", choices, [], 1.0, None)
    choices["sampling_defaults"]["value"] = {}
    assert not any(line.startswith("sampling") for line in startup_lines("m", choices, [], 1.0, None))
    assert choice_lines(choices) == ["sampling_defaults  none: from the model"]
