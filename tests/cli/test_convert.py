"""`jaxserve convert`: what it says, what it refuses, and that a killed one leaves nothing that loads."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError
from checkpoints.load import NativeWeights, open_weights
from jaxserve.engine.progress import Silent
from jaxserve.offline import read_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
ROOT = Path(__file__).parents[2]
GGUF = FIXTURES / "gguf" / "gguf_llama_legacy" / "model.gguf"
LLAMA = FIXTURES / "models" / "llama_untied"


@pytest.fixture
def native(run, tmp_path) -> Path:
    assert run("convert", str(GGUF), str(tmp_path / "native")).code == 0
    return tmp_path / "native"


def test_what_it_says(run, tmp_path):
    ran = run("convert", str(GGUF), str(tmp_path / "native"))
    (line,) = ran.out.splitlines()
    assert ran.code == 0
    assert line.startswith(f"{tmp_path / 'native'}  ")
    assert " bytes  " in line
    assert "Q4_1 " in line
    assert "writing weights: " in ran.err
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "native").rglob("*") if file.is_file())
    assert f"{num_bytes:,} bytes" in line


def test_for_programs_and_in_another_format(run, tmp_path):
    ran = run("convert", str(FIXTURES / "models" / "deepseek_v3"), str(tmp_path / "n"), "--format", "q8_0", "--json")
    told = json.loads(ran.out)
    assert ran.code == 0
    assert told["path"] == str(tmp_path / "n")
    assert set(told["bytes_by_format"]) == {"F32", "Q8_0"}
    assert "layers.1.attention.q_b" in told["kept"]
    assert f"{len(told['kept'])} matrices stayed as they were" in ran.err


def test_inspect_shows_it(run, native):
    shown = json.loads(run("inspect", str(native), "--json").out)
    source = json.loads(run("inspect", str(GGUF), "--json").out)
    assert shown["container"] == "orbax"
    for key in ("architecture", "num_layers", "num_parameters", "hidden_size", "vocab_size", "context_length"):
        assert shown[key] == source[key]
    assert set(shown["bytes_by_format"]) == set(source["bytes_by_format"])
    rows = run("inspect", str(native), "--tensors").out
    assert "layers.0.attention.q" in rows


def test_inspect_of_one_that_was_safetensors(run, tmp_path):
    assert run("convert", str(FIXTURES / "models" / "mixtral"), str(tmp_path / "native")).code == 0
    shown = json.loads(run("inspect", str(tmp_path / "native"), "--json").out)
    assert (shown["container"], shown["architecture"]) == ("orbax", "MixtralForCausalLM")
    assert shown["num_experts"] == 6


def test_the_tokenizer_comes_along(run, smollm2_path, tmp_path):
    assert run("convert", str(smollm2_path), str(tmp_path / "native")).code == 0
    want, got = (read_tokenizer(path, Silent()) for path in (smollm2_path, tmp_path / "native"))
    assert want is not None
    assert got is not None
    assert got.encode("Où est <|im_end|> 1234?") == want.encode("Où est <|im_end|> 1234?")
    assert (got.chat_template, got.eos_token_ids) == (want.chat_template, want.eos_token_ids)


@pytest.mark.slow
def test_it_generates_what_its_source_does(run, smollm2_path, tmp_path):
    assert run("convert", str(smollm2_path), str(tmp_path / "native")).code == 0
    options = ("-p", "The capital of France is", "--max-tokens", "8", "--temperature", "0", "--max-model-len", "128")
    want, got = (run("generate", str(path), *options) for path in (smollm2_path, tmp_path / "native"))
    assert got.code == 0
    assert got.out == want.out != ""


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (("--format", "q9_9"), "--format q9_9: expected one of f32, f16, bf16, q4_0", 2),
        (("--plan", "tp=2"), "--plan tp=2: ", 2),
    ],
)
def test_options_it_refuses(run, tmp_path, options, message, code):
    ran = run("convert", str(GGUF), str(tmp_path / "native"), *options)
    assert (ran.code, list(tmp_path.iterdir())) == (code, [])
    assert message in ran.error_line()


def test_a_plan_decides_the_chunks(run, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("[mesh]\ntensor = 2\n")
    ran = run("convert", str(LLAMA), str(tmp_path / "native"), "--plan", str(plan))
    assert ran.code == 0, ran.stderr
    with open_weights(tmp_path / "native") as weights:
        assert isinstance(weights, NativeWeights)
        chunk = weights.arrays._open("layers.0.attention.o", "").chunk_layout.read_chunk.shape
        assert chunk[1] * 2 == weights.arrays.parameters["layers.0.attention.o"].shape[1]


def test_a_plan_that_does_not_suit_the_model(run, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("[mesh]\nexpert = 2\n")
    ran = run("convert", str(LLAMA), str(tmp_path / "native"), "--plan", str(plan))
    assert ran.code == 2
    assert "the model has no experts" in ran.error_line()
    assert not (tmp_path / "native").exists()


def test_a_target_that_exists(run, native, tmp_path):
    assert "exists already" in run("convert", str(GGUF), str(native)).error_line()
    assert run("convert", str(GGUF), str(native), "--overwrite").code == 0
    (tmp_path / "mine").mkdir()
    ran = run("convert", str(GGUF), str(tmp_path / "mine"), "--overwrite")
    assert "is no native checkpoint" in ran.error_line()
    assert (tmp_path / "mine").is_dir()


def test_a_source_that_is_damaged_leaves_nothing(run, tmp_path):
    source = Path(shutil.copytree(FIXTURES / "models" / "llama_untied", tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    ran = run("convert", str(source), str(tmp_path / "native"))
    assert ran.code == 1
    assert "missing: " in ran.error_line()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A llama that takes about a second to encode."""
    folder = tmp_path_factory.mktemp("large")
    shutil.copy(FIXTURES / "models" / "llama_untied" / "config.json", folder)
    config = json.loads((folder / "config.json").read_text())
    changes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8192, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config | changes | heads))
    rng = np.random.default_rng(0)
    tensors = {"model.norm.weight": np.ones(512, np.float32)}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = rng.random((8192, 512), np.float32)
    for layer in range(8):
        start = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}.{name}.weight"] = np.ones(512, np.float32)
        for name, shape in {"gate": (1024, 512), "up": (1024, 512), "down": (512, 1024)}.items():
            tensors[f"{start}.mlp.{name}_proj.weight"] = rng.random(shape, np.float32)
        for name in "qkvo":
            tensors[f"{start}.self_attn.{name}_proj.weight"] = rng.random((512, 512), np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def start_convert(source: Path, target: Path) -> subprocess.Popen[bytes]:
    code = "import sys; from jaxserve.cli.main import run; sys.argv[0] = 'jaxserve'; run()"
    command = [sys.executable, "-c", code, "convert", str(source), str(target), "--format", "q4_k"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_kill_at_any_moment_leaves_nothing_that_loads(run, large, tmp_path):
    """What is left either is the whole checkpoint under its name, or is refused; and the next run is not hindered."""
    unfinished, target = tmp_path / "native.unfinished", tmp_path / "native"
    rng = random.Random(0)
    num_interrupted = 0
    for delay in (0.0, 0.2, 0.5, rng.uniform(0, 1), rng.uniform(0, 2)):
        process = start_convert(large, target)
        while process.poll() is None and not unfinished.exists() and not target.exists():
            time.sleep(0.002)
        time.sleep(delay)
        process.kill()
        process.communicate()
        for path in tmp_path.iterdir():
            if path == target:
                shutil.rmtree(path)  # it was quicker: complete, as other tests say
                continue
            num_interrupted += 1
            with pytest.raises(CheckpointError, match="an unfinished conversion"):
                open_weights(path)
            assert run("generate", str(path), "-p", "x").code == 1
    assert num_interrupted >= 2
    assert run("convert", str(large), str(target), "--format", "q4_k").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
