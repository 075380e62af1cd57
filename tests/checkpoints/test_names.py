"""Name tables in both directions, and one error for everything that does not add up."""

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.names import NameMap, check_accounting
from checkpoints.tensors import TensorInfo

NAMES = NameMap(
    rules={
        "embedding": "token_embd.weight",
        "layers.{layer}.q": "blk.{layer}.attn_q.weight",
        "layers.{layer}.experts.{expert}.up": "blk.{layer}.ffn_up.{expert}.weight",
    }
)


def info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name=name, shape=shape, format="F32", offset=0, num_bytes=0)


def test_names_translate_both_ways() -> None:
    assert NAMES.tensor_name("embedding") == "token_embd.weight"
    assert NAMES.tensor_name("layers.12.q") == "blk.12.attn_q.weight"
    assert NAMES.tensor_name("layers.3.experts.7.up") == "blk.3.ffn_up.7.weight"
    assert NAMES.parameter("blk.3.ffn_up.7.weight") == "layers.3.experts.7.up"
    for unknown in ("layers.x.q", "layers.1.q.weight", "xembedding", "layers.1-q"):
        with pytest.raises(KeyError, match="no rule"):
            NAMES.tensor_name(unknown)


def test_expand_fills_every_placeholder() -> None:
    names = NAMES.expand(layer=2, expert=3)
    assert len(names) == 1 + 2 + 2 * 3
    assert names["layers.1.experts.2.up"] == "blk.1.ffn_up.2.weight"
    assert {NAMES.tensor_name(ours): theirs for ours, theirs in names.items()} == {v: v for v in names.values()}


def test_accounting_passes_when_all_is_said() -> None:
    check_accounting(
        {"a": (2, 3), "output": (4,), "output_norm": (4,)},
        {"a": info("a", 2, 3), "output_norm": info("output_norm", 4), "blk.11.rot": info("blk.11.rot", 1)},
        tied=["output"],
        declared_absent=["blk.{layer}.rot"],
        source="model.gguf",
    )


def test_accounting_lists_everything_in_one_error() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_accounting(
            {"a": (2, 3), "b": (4,), "c": (1,), "d": (5,)},
            {"a": info("a", 3, 2), "x": info("x", 1), "blk.z.rot": info("blk.z.rot", 1), "d": info("d", 5)},
            declared_absent=["blk.{layer}.rot"],
            source="model.gguf",
        )
    assert str(caught.value) == (
        "model.gguf: the tensors are not those of the model: 2 missing: b, c; 2 unexpected: blk.z.rot, x; "
        "1 wrongly shaped: a is [3, 2], not [2, 3]"
    )


def test_a_tied_tensor_in_the_file_still_needs_its_shape() -> None:
    with pytest.raises(CheckpointError, match=r"1 wrongly shaped: output is \[3\], not \[4\]"):
        check_accounting({"output": (4,)}, {"output": info("output", 3)}, tied=["output"], source="m")
    check_accounting({"output": (4,)}, {"output": info("output", 4)}, tied=["output"], source="m")


def test_a_long_list_is_cut() -> None:
    with pytest.raises(CheckpointError, match=r"60 missing: .* and 10 more"):
        check_accounting({f"t{index}": (1,) for index in range(60)}, {}, source="m")
