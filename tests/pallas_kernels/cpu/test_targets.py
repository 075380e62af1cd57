"""Compiling, caching and registering: what is reused, what is not, and what is refused."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import build as build_module
from pallas_kernels.cpu import keys
from pallas_kernels.cpu import targets as targets_module
from pallas_kernels.cpu.build import ObjectsNotKept
from pallas_kernels.cpu.levels import LEVELS, known_level, level_named
from pallas_kernels.cpu.object_files import read_object, write_object
from pallas_kernels.cpu.targets import KernelBuildError, NotRegistered, Targets, register

FUNCTION = "own_kernel:scale"


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of machine code that a test may change. It differs in each test: a registered target stays."""
    path = tmp_path / "sources" / "own_kernel.py"
    path.parent.mkdir()
    path.write_text(f"# {tmp_path}\n")
    monkeypatch.syspath_prepend(str(path.parent))
    return path


@pytest.fixture
def compiled(probes, kernel_cache, monkeypatch):
    """The functions compiled so far, by a compiler that always writes the scale probe."""
    probe = read_object(next(kernel_cache.glob(f"*{probes.name_of('ffi_probes:scale').rsplit('_', 1)[1]}.o")))
    assert probe is not None
    functions = []

    def compile_share(share, level, finished_one):
        for function, path in share:
            write_object(path, probe)
            functions.append(function)
            finished_one()

    monkeypatch.setattr(build_module, "_compile", compile_share)
    return functions


def _register(tmp_path) -> str:
    return register([FUNCTION], cache_dir=tmp_path / "cache").name_of(FUNCTION)


def _scaled(name: str) -> np.ndarray:
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((2, 8), jnp.float32))
    return np.asarray(call(jnp.ones((2, 8)), scale=np.float32(3), add=np.int64(1)))


def test_an_object_is_reused(own_module, compiled, tmp_path):
    first = _register(tmp_path)
    assert _register(tmp_path) == first
    assert register([FUNCTION], cache_dir=tmp_path / "another folder").name_of(FUNCTION) == first
    assert compiled == [FUNCTION]
    np.testing.assert_array_equal(_scaled(first), np.full((2, 8), 4.0))


def test_a_changed_source_gives_another_target(own_module, compiled, tmp_path):
    first = _register(tmp_path)
    own_module.write_text(f"# {tmp_path} changed\n")
    second = _register(tmp_path)
    assert first != second
    assert compiled == [FUNCTION, FUNCTION]
    np.testing.assert_array_equal(_scaled(first), _scaled(second))


def test_a_changed_import_gives_another_target(own_module, compiled, tmp_path):
    own_module.write_text(f"import imported_by_it\n# {tmp_path}\n")
    neighbour = own_module.parent / "imported_by_it.py"
    neighbour.write_text("# old\n")
    first = _register(tmp_path)
    neighbour.write_text("# new\n")
    assert _register(tmp_path) != first


def test_a_file_beside_it_is_of_no_account(own_module, compiled, tmp_path):
    first = _register(tmp_path)
    (own_module.parent / "not_imported.py").write_text("# new\n")
    assert _register(tmp_path) == first


def test_imports_are_followed_through_other_folders():
    found = keys._imported_sources(keys._module_file("pallas_kernels.grouped_matmul.cpu_compiled:q4_1"))
    folders = {f"{path.parent.name}/{path.name}" for path in found}
    assert {"grouped_matmul/cpu_compiled.py", "quantized_matmul/formats_compiled.py", "cpu/simd.py"} <= folders
    assert "quantized_matmul/cpu.py" not in folders  # it calls the machine code, and may change


def test_another_level_gives_another_target(own_module, compiled, tmp_path):
    generic = register([FUNCTION], cache_dir=tmp_path / "cache", level="generic")
    assert generic.level == "generic"
    assert (generic.name_of(FUNCTION) != _register(tmp_path)) == (level_named(None).name != "generic")


def test_a_damaged_object_is_compiled_again(own_module, compiled, tmp_path):
    name = targets_module._target_name(FUNCTION, level_named(None), keys.installed_compilers())
    path = tmp_path / "cache" / f"{name.removeprefix('cpu_')}.o"
    path.parent.mkdir()
    path.write_bytes(b"\0" * 1000)
    np.testing.assert_array_equal(_scaled(_register(tmp_path)), np.full((2, 8), 4.0))
    assert compiled == [FUNCTION]


def test_progress_counts_what_is_compiled(own_module, compiled, tmp_path):
    seen = []
    for _ in range(2):
        register([FUNCTION], cache_dir=tmp_path / "cache", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 1), (1, 1)]


def test_a_folder_that_cannot_be_written_is_an_error(own_module, compiled, tmp_path):
    (tmp_path / "cache").write_text("a file\n")
    with pytest.raises(ObjectsNotKept, match="cannot keep compiled kernels in"):
        _register(tmp_path)


@pytest.mark.parametrize("function", ["no_such_module:f", "no_such_package.module:f", "own_kernel"])
def test_an_unknown_function_is_an_error(own_module, tmp_path, function):
    with pytest.raises(ValueError, match="is no kernel: expected module:attribute"):
        register([function], cache_dir=tmp_path)


def test_an_unknown_level_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="unknown CPU level 'sse9'; choose avx512vnni, avx512, avx2, generic"):
        register([], cache_dir=tmp_path, level="sse9")


def test_a_level_above_the_cpu_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr("pallas_kernels.cpu.levels._host_features", lambda: frozenset({"avx2", "fma"}))
    with pytest.raises(ValueError, match="CPU level 'avx2' needs f16c, bmi, bmi2, which this CPU lacks"):
        register([], cache_dir=tmp_path, level="avx2")
    assert register([], cache_dir=tmp_path).level == "generic"
    assert known_level("avx2") in LEVELS


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_the_best_level_is_chosen(monkeypatch, level):
    monkeypatch.setattr("pallas_kernels.cpu.levels._host_features", lambda: frozenset(level.features))
    assert level_named(None) == level


def test_an_unregistered_kernel_is_named():
    with pytest.raises(NotRegistered, match=r"own_kernel:scale is not registered \(registered: a:b\); pass it to"):
        Targets(level="generic", names={"a:b": "cpu_a_b_0"}).name_of(FUNCTION)


def test_a_warm_start_needs_no_numba(targets):
    assert targets.names
    assert "numba" not in sys.modules


@pytest.mark.parametrize("attribute", ["raises", pytest.param("allocates", marks=pytest.mark.slow)])
def test_code_that_needs_python_is_refused(monkeypatch, request, tmp_path, attribute):
    monkeypatch.syspath_prepend(str(request.path.parent / "machine_code"))
    with pytest.raises(KernelBuildError, match=r"NotSelfContained: the code calls .*; kernels may call C only"):
        register([f"not_self_contained:{attribute}"], cache_dir=tmp_path)
