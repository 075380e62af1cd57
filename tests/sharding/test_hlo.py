"""Collectives in HLO text: spellings of groups, loops, branches, asynchronous pairs."""

import pytest

from sharding.hlo import collectives, replica_groups

LOOP = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %psum = f32[8,16]{1,0:T(8,128)} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %out = (s32[], f32[8,16]) tuple(%i, %psum)
}

%condition (p: (s32[], f32[8,16])) -> pred[] {
  %length = s32[]{:T(128)} constant(58)
  ROOT %lt = pred[] compare(%i, %length), direction=LT
}

ENTRY %main (p0: f32[8,16]) -> f32[8,16] {
  %loop = (s32[], f32[8,16]) while(%init), condition=%condition, body=%body
  ROOT %r = f32[8,16] get-tuple-element(%loop), index=1
}
"""


def entry(*lines: str, before: str = "") -> str:
    return "\n".join([before, "ENTRY %main (p0: f32[8,16]) -> f32[8,16] {", *(f"  {line}" for line in lines), "}"])


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [(0, 1), (2, 3)]),
        ("replica_groups={}", [(0, 1, 2, 3)]),
        ("replica_groups=[2,2]<=[4]", [(0, 1), (2, 3)]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['expert'=2,'tensor'=2] {'tensor'}", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['expert'=2,'tensor'=2] {'expert'}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['expert'=2,'tensor'=2] {'tensor','expert'}", [(0, 2, 1, 3)]),
        ("no groups at all", [(0, 1, 2, 3)]),
    ],
)
def test_spellings_of_replica_groups(text, groups):
    assert replica_groups(text, 4) == groups


def test_another_spelling_is_an_error():
    with pytest.raises(ValueError, match="unknown spelling of replica_groups: replica_groups=@mesh"):
        replica_groups("replica_groups=@mesh", 4)


def test_a_loop_counts_as_often_as_its_condition_says():
    (found,) = collectives(LOOP, 4)
    assert (found.kind, found.group, found.count) == ("all-reduce", (0, 1), 58)
    assert (found.bytes, found.wire_bytes) == (58 * 512, 58 * 512 * 2 * 1 / 2)


def test_a_stated_trip_count_goes_before_the_condition():
    stated = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"61"},"x":{}}')
    assert collectives(stated, 4)[0].count == 61


def test_loops_in_loops_multiply():
    outer = LOOP.replace("ENTRY %main", "%inner").replace("jit_step", "nested")
    text = entry(
        "%loop = (s32[], f32[8,16]) while(%init), condition=%condition, body=%inner, "
        'backend_config={"known_trip_count":{"n":"3"}}',
        before=outer,
    )
    assert collectives(text, 4)[0].count == 3 * 58


def test_a_start_counts_once_with_its_results():
    (found,) = collectives(
        entry(
            "%s = ((f32[32,4]{0,1}), f32[32,8]{0,1}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={1}",
            "%d = f32[32,8]{0,1} all-gather-done(%s)",
        ),
        2,
    )
    assert (found.count, found.bytes, found.wire_bytes, found.shape) == (1, 1024, 512, "f32[32,8]")


def test_an_async_computation_counts_once():
    inside = "%wrapped (p: f32[4]) -> f32[4] {\n  ROOT %r = f32[4] all-reduce(%p), replica_groups=[1,2]<=[2]\n}\n"
    text = entry(
        "%s = ((f32[4]), f32[4]) async-start(%x), calls=%wrapped",
        "%d = f32[4] async-done(%s), calls=%wrapped",
        before=inside,
    )
    assert [each.count for each in collectives(text, 2)] == [1]


def test_of_a_conditional_the_branch_that_sends_least_counts():
    branches = (
        "%much (p: f32[64]) -> f32[64] {\n  ROOT %r = f32[64] all-reduce(%p), replica_groups={{0,1}}\n}\n"
        "%little (p: f32[64]) -> f32[64] {\n  ROOT %r = f32[8] all-reduce(%p), replica_groups={{0,1}}\n}\n"
    )
    for spelling in ("branch_computations={%much, %little}", "true_computation=%much, false_computation=%little"):
        text = entry(f"%c = f32[64] conditional(%p, %x, %x), {spelling}", before=branches)
        assert [each.shape for each in collectives(text, 2)] == ["f32[8]"]


@pytest.mark.parametrize(
    ("line", "size", "wire"),
    [
        ("f32[8]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}", 128, 96),
        ("(bf16[8]{0}, bf16[8]{0}) all-to-all(%x, %y), replica_groups={{0,1}}", 32, 16),
        ("f8e4m3fn[64]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 64, 64),
        ("s4[64]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}", 32, 16),
    ],
)
def test_bytes_of_each_kind(line, size, wire):
    (found,) = collectives(entry(f"%c = {line}"), 4)
    assert (found.bytes, found.wire_bytes) == (size, wire)


def test_what_is_no_module_is_an_error():
    with pytest.raises(ValueError, match="names no ENTRY"):
        collectives("nothing", 2)
