"""What a file says is shown, also when the file is hostile."""

import json
import shutil
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"
EVIL = "\x1b]0;owned\x07 [bold]x[/bold]\nnext line \u202etxt"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of safetensors whose config tries to steer the terminal."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "models" / "llama_untied", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": EVIL}))
    (folder / "chat_template.jinja").write_text("{{ messages }}" + EVIL)
    return folder


def test_a_table(run, model):
    ran = run("inspect", str(model))
    rows = dict(line.split(maxsplit=1) for line in ran.out.splitlines() if len(line.split()) > 1)
    assert ran.code == 0
    assert rows["container"].strip() == "safetensors"
    assert rows["architecture"].strip() == "LlamaForCausalLM"
    assert "model.embed_tokens.weight" not in ran.out


def test_strings_of_a_file_do_not_steer_the_terminal(run, model):
    ran = run("inspect", str(model))
    assert "\x1b" not in ran.out
    assert "\u202e" not in ran.out
    assert r"\x1b]0;owned\x07 [bold]x[/bold] next line \u202etxt" in ran.out


def test_tensors_on_request(run, model):
    ran = run("inspect", str(model), "--tensors")
    [line] = [line for line in ran.out.splitlines() if line.startswith("model.embed_tokens.weight")]
    assert " x " in line


def test_json(run, model):
    result = json.loads(run("inspect", str(model), "--json").out)
    assert (result["name"], result["container"]) == (EVIL, "safetensors")
    assert "tensors" not in result
    with_tensors = json.loads(run("inspect", str(model), "--json", "--tensors").out)
    assert len(with_tensors["tensors"]) == with_tensors["num_tensors"] == result["num_tensors"] > 0


def test_what_a_model_recommends_for_sampling(run, model):
    (model / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 106]}')
    out = run("inspect", str(model)).out
    assert [line.split(maxsplit=2)[2].strip() for line in out.splitlines() if line.startswith("sampling def")] == [
        "temperature 0.6"
    ]
    assert any(line.startswith("ends at tokens") and line.rstrip().endswith("1, 106") for line in out.splitlines())
    found = json.loads(run("inspect", str(model), "--json").out)
    assert (found["sampling_defaults"], found["eos_token_ids"]) == ({"temperature": 0.6}, [1, 106])
    (model / "generation_config.json").write_text('{"temperature": "\\u001b[31mhot"}')
    ran = run("inspect", str(model))
    assert ran.code == 1
    assert "generation_config.json: temperature must be a number" in ran.error_line()
    assert "\x1b" not in ran.err


def test_a_model_is_needed(run):
    ran = run("inspect")
    assert ran.code == 2
    assert "Missing argument" in ran.error_line()
