"""A key is the same where the program is, and another one wherever the program could be another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine import program_keys
from jaxserve.engine.program_keys import Nameless, identity, lowered_key, traced_key
from jaxserve.layer_groups import layer_groups
from jaxserve.models.llama import MODEL
from jaxserve.step_inputs import StepShape
from pallas_kernels.cpu.targets import Origin, Targets
from pallas_kernels.kernels import REFERENCE, XLA, cpu_kernels
from pallas_kernels.pytree import pytree

SHAPE = StepShape(single_rows=1, chunk_tokens=0, chunk_rows=0, max_pages=4)
ARGUMENTS = ({"w": jnp.ones((2, 3))}, jnp.zeros(4, jnp.int32))


def key(made_of=(MODEL, XLA, SHAPE), arguments=ARGUMENTS, name="step"):
    return traced_key(name, made_of, arguments)


def targets(name="cpu_q4_1_abc", origin: Origin = "compiled"):
    return Targets(level="avx2", names={"m:q4_1": name}, origins={"m:q4_1": origin})


@pytest.fixture(autouse=True)
def sources_as_imported(monkeypatch):
    monkeypatch.setattr(program_keys, "_read_sources", lambda: ("sources", 0.0))


def test_what_is_made_again_has_the_same_key():
    again = ({"w": jnp.full((2, 3), 7.0, jnp.float32)}, jnp.ones(4, jnp.int32))  # values are no part of a program
    assert key(arguments=again) == key()
    assert key((MODEL, cpu_kernels(targets()), SHAPE)) == key((MODEL, cpu_kernels(targets(origin="cached")), SHAPE))


@pytest.mark.parametrize(
    "made_of",
    [
        (MODEL, REFERENCE, SHAPE),
        (dataclasses.replace(MODEL, unembed=MODEL.forward), XLA, SHAPE),
        (MODEL, XLA, dataclasses.replace(SHAPE, max_pages=5)),
        (MODEL, XLA, dataclasses.replace(SHAPE, groups=layer_groups([16, None], 16, 3, 9))),
        (MODEL, cpu_kernels(targets()), SHAPE),
        (MODEL, cpu_kernels(targets("cpu_q4_1_abd")), SHAPE),
    ],
)
def test_another_model_kernel_or_shape(made_of):
    assert key(made_of) != key()
    others = [(MODEL, cpu_kernels(targets(name)), SHAPE) for name in ("a", "b")]
    assert key(others[0]) != key(others[1])


@pytest.mark.parametrize(
    "first",
    [
        {"w": jnp.ones((3, 2))},
        {"w": jnp.ones((2, 3), jnp.bfloat16)},
        {"v": jnp.ones((2, 3))},
        {"w": jnp.ones((2, 3)), "x": jnp.ones(())},
    ],
)
def test_other_arguments(first):
    assert key(arguments=(first, ARGUMENTS[1])) != key()


def test_static_values_of_the_arguments_count():
    @pytree
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Packed:
        array: jax.Array
        group: int = dataclasses.field(metadata={"static": True})

    keys = {key(arguments=(Packed(array=jnp.ones(3), group=group),)) for group in (32, 64)}
    assert len(keys) == 2


def test_the_surroundings_count(monkeypatch):
    before, text = key(), lowered_key("step", "text", ARGUMENTS)
    assert lowered_key("step", "other text", ARGUMENTS) != text
    with jax.default_matmul_precision("highest"):
        assert key() != before
        assert lowered_key("step", "text", ARGUMENTS) != text
    monkeypatch.setattr(program_keys, "pool_size", lambda: 77)
    assert key() != before
    monkeypatch.undo()
    monkeypatch.setattr(program_keys, "_versions", lambda: ("0.0", "0.0", "0.0"))
    assert lowered_key("step", "text", ARGUMENTS) != text


def test_where_the_cache_is_does_not_count(tmp_path):
    before, folder = key(), jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert key() == before
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)


def test_other_sources(monkeypatch):
    before = key()
    monkeypatch.setattr(program_keys, "_read_sources", lambda: ("other sources", 0.0))
    assert key() != before


def test_the_digest_of_sources_covers_names_and_contents(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(program_keys, "_ROOT", tmp_path)
    read = program_keys._read_sources.__wrapped__
    for package in program_keys.PACKAGES:
        with pytest.raises(Nameless, match=f"{package} has no sources"):
            read()
        (tmp_path / package / "part").mkdir(parents=True)
        (tmp_path / package / "part" / "one.py").write_text("")
    file = tmp_path / "jaxserve" / "part" / "one.py"
    digests = {read()[0]}
    for content in ("a", "b"):
        file.write_text(content)
        digests.add(read()[0])
    file.rename(file.with_name("two.py"))
    digests.add(read()[0])
    assert len(digests) == 4


def test_sources_changed_after_the_import_have_no_key(monkeypatch):
    monkeypatch.setattr(program_keys, "_read_sources", lambda: ("sources", program_keys._IMPORTED_AT + 1))
    with pytest.raises(Nameless, match="changed after"):
        key()
    assert lowered_key("step", "text", ARGUMENTS)  # what is in hand has one


def of_here(x):
    return x


@pytest.mark.parametrize("value", [of_here, lambda x: x, object(), jnp.ones(2), type("Mine", (), {})])
def test_what_is_not_ours_has_no_name(value):
    with pytest.raises(Nameless):
        identity(value)
    with pytest.raises(Nameless):
        identity(functools.partial(MODEL.forward, value))


def test_values_are_told_apart_by_type_and_content():
    values = [1, 1.0, True, "1", None, (1,), [1], {1: 1}, {1}, np.float32(1), np.ones(1), np.zeros(1), np.ones((1, 1))]
    values += [np.dtype("int8"), int, functools.partial(MODEL.forward, 1), functools.partial(MODEL.forward, 2)]
    assert len({repr(identity(value)) for value in values}) == len(values)


def test_the_order_of_a_mapping_does_not_count():
    assert identity({"a": 1, "b": 2}) == identity({"b": 2, "a": 1})
    assert identity({"a", "b"}) == identity({"b", "a"})


def test_functions_of_one_line_are_told_apart_by_what_they_hold_and_where_they_stand():
    spec = MODEL.param_specs
    assert identity(spec) != identity(MODEL.config_from_hf)
    code = (lambda: 1, lambda: 2)
    assert program_keys._place(code[0].__code__) != program_keys._place(code[1].__code__)
