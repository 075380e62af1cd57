"""When the CPU kernels are the default: they are taken where they can be had, and where not, it is said and counted."""

import os
from pathlib import Path
from typing import Any, get_args

import pytest

from jaxserve.config import CpuLevel, EngineConfig
from jaxserve.engine import cpu_choice
from jaxserve.engine.build import build_engine
from jaxserve.engine.loading import cpu_kernel_needs
from jaxserve.engine.progress import Silent
from jaxserve.errors import ConfigError
from pallas_kernels.cpu import targets as targets_module
from pallas_kernels.cpu.levels import LEVELS
from pallas_kernels.cpu.prebuilt import PrebuiltObjects
from pallas_kernels.cpu.targets import Targets

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
LEGACY = FIXTURES / "gguf" / "gguf_llama_legacy" / "model.gguf"
FLOAT = FIXTURES / "models" / "llama_untied"


class Heard(Silent):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def started(path: Path, **options: Any):
    """(choices, what was said) of an engine for a model."""
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    cache: dict[str, Any] = {"compilation_cache_dir": Path(os.environ["JAX_COMPILATION_CACHE_DIR"])}
    heard = Heard()
    config = EngineConfig(model=str(path), **(sizes | cache | options))
    built = build_engine(config, path, frozenset(), heard, warm_up=False)
    built.engine.close()
    return built.choices, heard.lines


@pytest.fixture
def cpu_by_default(monkeypatch):
    monkeypatch.setattr(cpu_choice, "AUTO_ON_CPU", "cpu")


def test_the_switch_decides(monkeypatch):
    for default in ("xla", "reference"):
        monkeypatch.setattr(cpu_choice, "AUTO_ON_CPU", default)
        assert started(FLOAT)[0]["kernels"].value == default


def test_they_are_taken_where_they_can_be_had(cpu_by_default):
    choices, said = started(LEGACY)
    assert choices["kernels"].value == "cpu"
    assert choices["weight_layout"].value == "tiled"
    assert choices["cpu_level"].reason == "the best this CPU has"
    assert "kernel_fallback" not in choices
    assert said == []


@pytest.mark.parametrize(
    ("path", "options", "reason"),
    [
        (LEGACY, {"dtype": "bfloat16"}, "XLA's own operations"),
        (LEGACY, {"expand_weights": "always"}, "XLA's own operations"),
        (LEGACY, {"kernels": "xla"}, "named by the user"),
    ],
    ids=["another dtype", "expanded", "by name"],
)
def test_they_are_not_missed_where_they_have_nothing_to_do(cpu_by_default, path, options, reason):
    choices, said = started(path, **options)
    assert choices["kernels"].value == "xla"
    assert reason in choices["kernels"].reason
    assert "kernel_fallback" not in choices
    assert said == []


@pytest.fixture
def nothing_ahead(cpu_by_default, monkeypatch, tmp_path):
    """No object in the package, none registered: a process that has to look for everything."""
    monkeypatch.setattr(targets_module, "_registered", {})
    none = PrebuiltObjects(folder=tmp_path, compilers=None)
    monkeypatch.setattr("pallas_kernels.cpu.prebuilt.open_prebuilt", lambda folder: none)
    monkeypatch.setattr("pallas_kernels.cpu.build.subprocess.Popen", None)
    return tmp_path


def no_compiler(monkeypatch, tmp_path) -> dict:
    def missing() -> str:
        raise targets_module.metadata.PackageNotFoundError("numba")

    monkeypatch.setattr(targets_module, "installed_compilers", missing)
    return {}


def no_cache(monkeypatch, tmp_path) -> dict:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    return {"compilation_cache_dir": tmp_path}


def no_build(monkeypatch, tmp_path) -> dict:
    def fail(share: object, level: object, finished: object) -> None:
        raise cpu_choice.KernelBuildError("compiling failed")

    monkeypatch.setattr("pallas_kernels.cpu.build._compile", fail)
    return {"compilation_cache_dir": tmp_path}


def wrong_results(monkeypatch, tmp_path) -> dict:
    monkeypatch.setattr(cpu_choice, "register", lambda functions, **options: Targets(level="generic", names={}))
    monkeypatch.setattr(cpu_choice.KernelNeeds, "self_test", lambda needs, targets: float("nan"))
    return {}


LACKS = {"compiler": no_compiler, "cache": no_cache, "build": no_build, "self_test": wrong_results}


@pytest.mark.parametrize("lack", LACKS)
def test_what_is_missing_is_said_in_one_line_and_counted(nothing_ahead, monkeypatch, lack):
    options = LACKS[lack](monkeypatch, nothing_ahead)
    choices, said = started(LEGACY, **options)
    assert choices["kernels"].value == "xla"
    assert choices["weight_layout"].value == "expanded"
    assert choices["kernel_fallback"].value == lack
    (line,) = said
    assert line.startswith(f"no CPU kernels: {choices['kernel_fallback'].reason}. XLA serves the model instead")
    assert "\n" not in line
    with pytest.raises(ConfigError, match=r"^--kernels cpu: .*; choose xla$"):
        started(LEGACY, kernels="cpu", **options)


def test_the_formats_are_known_before_the_load():
    formats, config = cpu_kernel_needs(LEGACY)
    assert formats.single == {"BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    assert (formats.experts, config.head_size) == (set(), 16)
    assert cpu_kernel_needs(FLOAT)[0].single == {"F32"}


def test_sizes_the_kernels_do_not_take_are_left_to_xla(cpu_by_default):
    choices, (line,) = started(LEGACY, page_size=8)
    assert (choices["kernels"].value, choices["kernel_fallback"].value) == ("xla", "shape")
    assert "page size 8 is no multiple of 16" in line
    with pytest.raises(ConfigError, match=r"^--kernels cpu: page size 8 is no multiple of 16"):
        started(LEGACY, page_size=8, kernels="cpu")


def test_a_lower_level_can_be_named(monkeypatch):
    monkeypatch.setattr(cpu_choice, "register", lambda functions, *, level, **options: Targets(level=level, names={}))
    monkeypatch.setattr(cpu_choice.KernelNeeds, "self_test", lambda needs, targets: 0.0)
    choices, _ = started(LEGACY, kernels="cpu", cpu_level="generic")
    assert choices["cpu_level"].value == "generic"
    assert choices["cpu_level"].reason == "--cpu-level"


def test_a_level_this_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setattr("pallas_kernels.cpu.levels._host_features", lambda: frozenset())
    with pytest.raises(ConfigError, match=r"^--cpu-level: CPU level 'avx2' needs avx2, .*, which this CPU lacks$"):
        started(LEGACY, kernels="cpu", cpu_level="avx2")


def test_a_level_without_kernels_is_refused():
    with pytest.raises(ConfigError, match=r"^--cpu-level avx2 is for --kernels cpu: leave one of them out$"):
        started(LEGACY, kernels="xla", cpu_level="avx2")


def test_the_levels_are_those_of_the_kernels():
    assert get_args(CpuLevel) == ("auto", *(level.name for level in LEVELS))
