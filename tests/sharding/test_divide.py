"""Heads and widths that a number of devices does not divide: every query keeps its kv head, nothing is lost."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.config import PLAN_NAMES
from sharding.divide import ZEROS, divide, divided_heads, taken
from sharding.plan import PRESETS, ShardingPlan, named_plan, read_plan
from sharding.spec import ArraySpec


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(14, 2), (28, 4), (20, 5), (12, 12), (10, 1), (32, 8), (7, 7)])
def test_every_query_stands_once_beside_its_own_kv_head(num_heads, num_kv_heads, parts):
    heads = divided_heads(num_heads, num_kv_heads, parts)
    assert len(heads.queries) % parts == 0
    assert len(heads.keys) % parts == 0
    group = len(heads.queries) // len(heads.keys)
    assert sorted(q for q in heads.queries if q != ZEROS) == list(range(num_heads))
    for at, query in enumerate(heads.queries):
        if query != ZEROS:
            assert heads.keys[at // group] == query // (num_heads // num_kv_heads)


def test_fewest_heads():
    assert len(divided_heads(28, 4, 8).queries) == 32
    assert len(divided_heads(12, 12, 8).queries) == 16  # whole heads of zeros, not two copies of each
    assert divided_heads(32, 8, 4).queries.tolist() == list(range(32))


def test_values_of_heads_and_widths():
    division = divide(ShardingPlan(tensor=4), 6, 2, has_kv_heads=True)
    rows, columns = division.indices(ArraySpec(shape=(12, 5), axes=("heads", "model")))
    assert columns is None
    assert rows is not None
    matrix = np.arange(60).reshape(12, 5)
    part = taken(matrix, rows, 0)
    assert len(part) == 2 * len(division.heads.queries)
    kept = rows != ZEROS
    np.testing.assert_array_equal(part[kept], matrix[rows[kept]])
    assert (part[~kept] == 0).all()
    assert division.indices(ArraySpec(shape=(8,), axes=("ffn",))) == [None]
    (width,) = division.indices(ArraySpec(shape=(9,), axes=("ffn",)))
    assert width is not None
    assert width.tolist() == [*range(9), ZEROS, ZEROS, ZEROS]


def test_a_plan_on_disk(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("[mesh]\ntensor = 4\nexpert = 2\n")
    plan = read_plan(path)
    assert (plan.tensor, plan.expert, plan.num_devices) == (4, 2, 8)
    assert plan.partition(("experts", "ffn", "model")) == PartitionSpec("expert", "tensor", None)


def test_plans_by_name(tmp_path):
    assert tuple(PRESETS) == PLAN_NAMES
    for name in PRESETS:
        plan = named_plan(name, 4)
        assert (plan.num_devices, plan.mesh_size(name)) == (4, 4)
    (tmp_path / "p.toml").write_text("[mesh]\ndata = 2\n")
    assert named_plan(str(tmp_path / "p.toml"), 8) == ShardingPlan(data=2)


def test_experts_are_dealt_out_over_the_groups_too_unless_a_rule_says_no(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("[mesh]\ntensor = 2\nexpert = 2\ndata = 2\n")
    plan = read_plan(path)
    assert (plan.num_devices, plan.size("experts"), str(plan)) == (8, 4, "tensor 2 x expert 2 x data 2")
    assert plan.partition(("experts", "ffn", "model")) == PartitionSpec(("data", "expert"), "tensor", None)
    path.write_text('[mesh]\nexpert = 2\ndata = 2\n[rules]\nexperts = ["expert"]\n')
    assert read_plan(path).partition(("experts", "ffn", "model")) == PartitionSpec("expert", None, None)


def test_slots_beyond_the_experts_hold_copies_of_the_first():
    plan = ShardingPlan(expert=4)
    (index,) = divide(plan, 4, 4, has_kv_heads=True).indices(ArraySpec(shape=(6,), axes=("experts",)))
    assert index is not None
    assert index.tolist() == [*range(6), 0, 1]
    (index,) = divide(ShardingPlan(expert=2, redundant_experts=3), 4, 4, has_kv_heads=True).indices(
        ArraySpec(shape=(6,), axes=("experts",))
    )
    assert index is not None
    assert index.tolist() == [*range(6), *range(4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh = 3", "expected a table"),
        ("[mesh]\ntensor = 0", r"\[mesh\] tensor = 0; allowed are tensor, expert, data, at least 1 each"),
        ("[mesh]\npipeline = 2", r"\[mesh\] pipeline = 2"),
        ("[mesh]\ntensor = 2\n[stages]\n", "found stages"),
        ("[mesh]\ntensor = 2\n[rules]\nheads = []\n", "has experts only"),
        ('[mesh]\ntensor = 2\n[rules]\nexperts = ["tensor"]\n', "allowed are .*data.*expert"),
        ("[mesh", "is not TOML"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_plan(path)
    assert "\n" not in str(error.value)
