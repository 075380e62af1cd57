"""Objects made ahead: what they are found by, and that with them nothing is compiled."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import pytest

from pallas_kernels.cpu import build as build_module
from pallas_kernels.cpu import keys, prebuilt
from pallas_kernels.cpu import targets as targets_module
from pallas_kernels.cpu.build import CompilerMissing
from pallas_kernels.cpu.levels import known_level, level_named
from pallas_kernels.cpu.object_files import read_object, write_object
from pallas_kernels.cpu.prebuilt import open_prebuilt, prebuild
from pallas_kernels.cpu.targets import register
from pallas_kernels.prebuild import all_functions
from pallas_kernels.quantized_matmul.cpu import function_of
from pallas_kernels.quantized_matmul.tiles import TILE_FORMATS

ROOT = Path(__file__).resolve().parents[3]
MACHINE_CODE = Path(__file__).parent / "machine_code"
FUNCTION = "own_kernel:scale"

# Registers an object made ahead where numba cannot be imported and no process started; prints origins and a result.
INSTALLED = """
import json, subprocess, sys
from pathlib import Path
sys.modules["numba"] = subprocess.Popen = None
folder, machine_code, cache = sys.argv[1:]
sys.path.append(machine_code)
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.cpu import keys
from pallas_kernels.cpu.targets import register
keys.installed_compilers = None
targets = register(["ffi_probes:scale"], cache_dir=Path(cache), prebuilt_dir=Path(folder))
call = jax.ffi.ffi_call(targets.name_of("ffi_probes:scale"), jax.ShapeDtypeStruct((2, 8), jnp.float32))
y = call(jnp.ones((2, 8)), scale=np.float32(3), add=np.int64(1))
print(json.dumps([dict(targets.origins), np.asarray(y).tolist()]))
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of machine code that differs in each test: a registered target stays."""
    path = tmp_path / "sources" / "own_kernel.py"
    path.parent.mkdir()
    path.write_text(f"# {tmp_path}\n")
    monkeypatch.syspath_prepend(str(path.parent))
    return path


@pytest.fixture
def compiled(probes, kernel_cache, monkeypatch):
    """(level, function) compiled so far, by a compiler that always writes the scale probe."""
    probe = read_object(next(kernel_cache.glob(f"*{probes.name_of('ffi_probes:scale').rsplit('_', 1)[1]}.o")))
    assert probe is not None
    seen = []

    def compile_share(share, level, finished_one):
        for function, path in share:
            write_object(path, probe)
            seen.append((level.name, function))
            finished_one()

    monkeypatch.setattr(build_module, "_compile", compile_share)
    return seen


def own_level() -> str:
    return level_named(None).name


def test_with_objects_made_ahead_nothing_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, str(MACHINE_CODE)])
    folder, cache = tmp_path / "prebuilt", tmp_path / "cache"
    assert prebuild(["ffi_probes:scale"], levels=[own_level()], folder=folder) == 1
    command = [sys.executable, "-c", INSTALLED, str(folder), str(MACHINE_CODE), str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stderr[-2000:]
    assert json.loads(child.stdout) == [{"ffi_probes:scale": "prebuilt"}, [[4.0] * 8] * 2]
    assert not cache.exists()


@pytest.mark.parametrize("level", prebuilt.LEVELS)
def test_levels_are_compiled_that_this_cpu_may_lack(own_module, compiled, monkeypatch, tmp_path, level):
    monkeypatch.setattr("pallas_kernels.cpu.levels._host_features", lambda: frozenset())
    prebuild([FUNCTION], levels=[level], folder=tmp_path)
    assert compiled == [(level, FUNCTION)]
    assert open_prebuilt(tmp_path).path_of(FUNCTION, known_level(level)) is not None


def test_first_the_package_then_the_cache_then_the_compiler(own_module, compiled, tmp_path):
    folders = {"cache_dir": tmp_path / "cache", "prebuilt_dir": tmp_path / "prebuilt"}
    first = register([FUNCTION], **folders)
    assert first.origins == {FUNCTION: "compiled"}
    targets_module._registered.pop(first.name_of(FUNCTION))  # as in the next process
    with pytest.MonkeyPatch.context() as patch:  # XLA's own table cannot be emptied
        patch.setattr(jax.ffi, "register_ffi_target", lambda *arguments, **options: None)
        assert register([FUNCTION], **folders).origins == {FUNCTION: "cached"}
        targets_module._registered.pop(first.name_of(FUNCTION))
        prebuild([FUNCTION], levels=[own_level()], folder=tmp_path / "prebuilt")
        assert register([FUNCTION], **folders).origins == {FUNCTION: "prebuilt"}
    # The same sources and compilers give one name, wherever they came together: compiled programs stay valid.
    assert register([FUNCTION], **folders).names == first.names


def test_what_is_out_of_date_is_not_used(own_module, compiled, tmp_path):
    prebuild([FUNCTION], levels=[own_level()], folder=tmp_path)
    own_module.write_text(f"# {tmp_path} changed\n")
    assert register([FUNCTION], cache_dir=tmp_path / "cache", prebuilt_dir=tmp_path).origins == {FUNCTION: "compiled"}


def test_a_damaged_object_is_not_used(own_module, compiled, tmp_path):
    prebuild([FUNCTION], levels=[own_level()], folder=tmp_path)
    (path,) = tmp_path.glob("*/*.o")
    path.write_bytes(path.read_bytes()[:-1])
    assert register([FUNCTION], cache_dir=tmp_path / "cache", prebuilt_dir=tmp_path).origins == {FUNCTION: "compiled"}


def test_the_folder_holds_what_was_asked_for_and_keeps_what_is_right(own_module, compiled, monkeypatch, tmp_path):
    prebuild([FUNCTION], levels=["generic", "avx2"], folder=tmp_path)
    assert prebuild([FUNCTION], levels=["generic"], folder=tmp_path) == 0
    assert [path.parent.name for path in tmp_path.glob("*/*.o")] == ["generic"]
    monkeypatch.setattr(prebuilt, "installed_compilers", lambda: "newer ones")
    assert prebuild([FUNCTION], levels=["generic"], folder=tmp_path) == 1
    assert open_prebuilt(tmp_path).compilers == "newer ones"
    assert len(compiled) == 3


def test_without_a_compiler_and_an_object_it_is_said_what_is_missing(own_module, monkeypatch, tmp_path):
    def missing() -> str:
        raise metadata.PackageNotFoundError("numba")

    monkeypatch.setattr(targets_module, "installed_compilers", missing)
    wanted = (
        rf"no finished kernel own_kernel_scale for {own_level()} came with .* numba, which compiles it, is not inst"
    )
    with pytest.raises(CompilerMissing, match=wanted):
        register([FUNCTION], cache_dir=tmp_path, prebuilt_dir=tmp_path)


def test_another_kind_of_machine_finds_nothing(own_module, compiled, monkeypatch, tmp_path):
    prebuild([FUNCTION], levels=["generic"], folder=tmp_path)
    monkeypatch.setattr(keys.platform, "machine", lambda: "riscv64")
    assert open_prebuilt(tmp_path).path_of(FUNCTION, known_level("generic")) is None


def test_every_op_lists_its_targets():
    assert set(map(function_of, TILE_FORMATS)) <= set(all_functions())
    assert len(all_functions()) == len(set(all_functions()))
