"""Options are the dataclasses' fields, one for one, and arrive in them."""

import dataclasses
from pathlib import Path

import pytest
import typer

from checkpoints.catalog import DEFAULT_MODEL
from jaxserve.cli import options
from jaxserve.cli.values import bias_entry, human_number, template_source
from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.options import ServerOptions

SAMPLING = options.sampling_options(max_tokens=128)


def _parsed(group: options.OptionGroup, *arguments: str) -> object:
    """What a command with this group gets from a command line."""
    seen: list[object] = []
    app = typer.Typer()

    def command(value: object) -> None:
        seen.append(value)

    app.command()(options.takes(value=group)(command))
    typer.main.get_command(app).main(args=list(arguments), standalone_mode=False)
    return seen[0]


def _sampling(*arguments: str) -> SamplingParams:
    """What a command samples with from this command line, where the model has no defaults."""
    choice = _parsed(SAMPLING, *arguments)
    assert isinstance(choice, options.SamplingChoice)
    return choice.over({})


def test_every_field_has_an_option():
    assert set(options.ENGINE_FLAGS) | {"model"} == EngineConfig.names()
    assert set(options.SAMPLING_FLAGS) | {"seed", "detokenize"} == SamplingParams.names()
    assert set(options.SERVER_FLAGS) == {field.name for field in dataclasses.fields(ServerOptions)}


def test_without_options_the_defaults_are_the_dataclasses(monkeypatch):
    monkeypatch.setenv("JAXSERVE_HOME", "/home-of-models")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("JAXSERVE_API_KEY", raising=False)
    monkeypatch.delenv("NPROC", raising=False)
    home = Path("/home-of-models")
    assert _parsed(options.engine_options()) == EngineConfig(
        model=DEFAULT_MODEL, cache_dir=home, compilation_cache_dir=home / "xla"
    )
    assert _sampling() == SamplingParams(max_tokens=128)
    assert _parsed(options.server_options()) == ServerOptions()


def test_engine_options_arrive():
    arguments = "m --dtype bfloat16 --max-model-len 8k --block-size 32 --kv-cache-memory-bytes 2G --no-overlap"
    rest = "--no-enable-prefix-caching --deterministic --seed -3 --cache-dir c --compilation-cache-dir d"
    assert _parsed(options.engine_options(), *arguments.split(), *rest.split()) == EngineConfig(
        model="m",
        dtype="bfloat16",
        max_model_len=8000,
        page_size=32,
        kv_cache_memory_bytes=2 * 2**30,
        overlap=False,
        enable_prefix_caching=False,
        deterministic=True,
        seed=-3,
        cache_dir=Path("c"),
        compilation_cache_dir=Path("d"),
    )


def test_sampling_options_arrive():
    arguments = "--temperature 0 --stop a --stop b --stop-token-id 4 --logit-bias 5=-1.5 -n 2 --no-skip-special-tokens"
    assert _sampling(*arguments.split()) == SamplingParams(
        temperature=0.0,
        stop=["a", "b"],
        stop_token_ids=[4],
        logit_bias={5: -1.5},
        n=2,
        skip_special_tokens=False,
        max_tokens=128,
    )


def test_a_models_defaults_stand_between_what_is_named_and_the_commands():
    model = {"temperature": 0.6, "top_k": 20, "max_tokens": 64}
    choice = _parsed(SAMPLING, "--temperature", "0")
    assert isinstance(choice, options.SamplingChoice)
    assert choice.over(model) == SamplingParams(temperature=0.0, top_k=20, max_tokens=64)
    assert choice.over({}) == SamplingParams(temperature=0.0, max_tokens=128)


def test_every_option_a_model_may_set_exists():
    names = {parameter.name for parameter in SAMPLING.parameters if parameter.default is None}
    assert names >= options.MODEL_DEFAULTS


def test_wrong_sampling_is_refused_before_a_model_is_known():
    with pytest.raises(InvalidRequest, match="temperature must be from 0 to 100"):
        _parsed(SAMPLING, "--temperature", "-1")


def test_server_options_arrive():
    arguments = "--port 1 --api-key a --api-key b --served-model-name m --max-body-bytes 1K --drain-timeout 2.5"
    assert _parsed(options.server_options(), *arguments.split()) == ServerOptions(
        port=1,
        api_keys=("a", "b"),
        served_model_names=("m",),
        max_body_bytes=1024,
        drain_timeout_seconds=2.5,
    )


def test_api_keys_may_stay_off_the_command_line(monkeypatch):
    monkeypatch.setenv("JAXSERVE_API_KEY", "a b")
    assert _parsed(options.server_options()) == ServerOptions(api_keys=("a", "b"))


def test_options_left_out_are_refused():
    group = options.sampling_options(max_tokens=1, leave_out=("n",))
    with pytest.raises(Exception, match="No such option: --n"):
        _parsed(group, "--n", "2")


def test_folders_come_from_the_environment_unless_given():
    folders = options.cache_folders
    assert folders({"XDG_CACHE_HOME": "/x"}, None, None) == (Path("/x/jaxserve"), Path("/x/jaxserve/xla"))
    assert folders({"JAX_COMPILATION_CACHE_DIR": "/j"}, Path("/c"), None) == (Path("/c"), Path("/j"))
    assert folders({"JAX_COMPILATION_CACHE_DIR": "/j"}, Path("/c"), Path("/d")) == (Path("/c"), Path("/d"))


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("8_192", 8192), ("8k", 8000), ("8K", 8192), ("8.3k", 8300), ("1m", 10**6), ("2G", 2**31)],
)
def test_human_numbers(text, number):
    assert human_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "8.5", "8.5K", "0.0001k", "8kk", "1e3", "8 k", "__", "٣"])
def test_other_numbers_are_refused(text):
    with pytest.raises(typer.BadParameter, match="no whole number"):
        human_number(text)


@pytest.mark.parametrize("text", ["5", "x=1", "5=", "=1"])
def test_a_wrong_bias_is_refused(text):
    with pytest.raises(typer.BadParameter, match="TOKEN_ID=NUMBER"):
        bias_entry(text)


def test_a_template_is_a_file_or_the_text(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert template_source(str(file)) == template_source("{{ messages }}") == "{{ messages }}"
    with pytest.raises(typer.BadParameter, match="neither a template"):
        template_source(str(tmp_path / "missing.jinja"))
