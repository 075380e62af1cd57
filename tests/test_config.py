"""Options of an engine: each refusal is one line that names the option and what it takes."""

import runpy
from pathlib import Path

import pytest

from jaxserve import config
from jaxserve.errors import ConfigError

# The tests' own type checks would refuse a wrong type before the code under test sees it: this copy has none.
EngineConfig = runpy.run_path(config.__file__)["EngineConfig"]

COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "num_pages",
    "kv_cache_memory_bytes",
    "max_waiting",
    "threads",
)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_integers_of_at_least_one(name):
    least = 2 if name == "max_model_len" else 1  # a token of prompt and one to generate
    assert getattr(EngineConfig(model="m", **{name: least}), name) == least
    flag = "--" + name.replace("_", "-")
    for wrong in (least - 1, -1, 1.5, "16", True):
        with pytest.raises(ConfigError, match=f"^{flag} must be an integer of at least {least}, got {wrong!r}$"):
            EngineConfig(model="m", **{name: wrong})


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_has_no_default_may_be_left_open(name):
    if name in ("page_size", "max_waiting"):
        with pytest.raises(ConfigError, match="got None"):
            EngineConfig(model="m", **{name: None})
    else:
        assert getattr(EngineConfig(model="m"), name) is None


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("dtype", "auto, float32, bfloat16"),
        ("kv_cache_dtype", "auto, float32, bfloat16, int8"),
        ("kernels", "auto, reference, xla, cpu"),
        ("cpu_level", "auto, avx512vnni, avx512, avx2, generic"),
        ("expand_weights", "auto, always, never"),
    ],
)
def test_choices(name, allowed):
    flag = "--" + name.replace("_", "-")
    for value in allowed.split(", "):
        EngineConfig(model="m", **{name: value})
    for wrong in ("float8", "", None, 1):
        with pytest.raises(ConfigError, match=f"^{flag} must be one of {allowed}, got {wrong!r}$"):
            EngineConfig(model="m", **{name: wrong})


@pytest.mark.parametrize("name", ["overlap", "deterministic", "enable_prefix_caching"])
def test_switches(name):
    flag = "--" + name.replace("_", "-")
    for wrong in ("no", 0, 1, None):
        with pytest.raises(ConfigError, match=f"^{flag} must be true or false, got {wrong!r}$"):
            EngineConfig(model="m", **{name: wrong})


def test_seeds():
    assert EngineConfig(model="m", seed=-5).seed == -5
    for wrong in ("5", 1.0, None, True):
        with pytest.raises(ConfigError, match=f"^--seed must be an integer, got {wrong!r}$"):
            EngineConfig(model="m", seed=wrong)


def test_folders_may_be_given_as_text():
    config = EngineConfig(model="m", cache_dir="some/folder", compilation_cache_dir="other")
    assert (config.cache_dir, config.compilation_cache_dir) == (Path("some/folder"), Path("other"))


def test_a_plan_that_is_no_file_is_refused_and_not_ignored():
    with pytest.raises(ConfigError, match="--plan tp8: neither tensor, expert, data nor a TOML file"):
        EngineConfig(model="m", plan="tp8")


def test_names_are_the_fields():
    assert {"model", "page_size", "seed", "plan"} <= EngineConfig.names()
