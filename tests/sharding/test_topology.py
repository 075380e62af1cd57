"""Names of topologies, figures of devices, and the arithmetic of a roofline."""

import re

import pytest

from sharding import topology
from sharding.devices import device_kinds
from sharding.roofline import StepWork, cost_per_million, decode_ceiling, experts_met, step_time
from sharding.topology import CompilerMissing, check_compiler, compiler_environment, read_topology


@pytest.mark.parametrize(
    ("text", "shown", "num_devices"),
    [
        ("v5e:4x4", "v5e:4x4", 16),
        ("v5p:4x4x8", "v5p:4x4x8", 128),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8),  # two devices a chip
        ("h200:8", "h200:1x8", 8),
        ("h200:2x8", "h200:2x8", 16),
        ("cpu:4", "cpu:4", 4),
    ],
)
def test_names(text, shown, num_devices):
    found = read_topology(text)
    assert (str(found), found.num_devices) == (shown, num_devices)
    assert found.memory_bytes > 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:4x4", "'v9:4x4' is no topology; expected KIND:SHAPE, such as v5e:4x4"),
        ("v5p", "'v5p' is no topology"),
        ("v5e:0x4", "is no topology"),
        ("v5p:4x4", "expected v5p:AxBxC"),
        ("h200:2x2x8", "expected h200:GPUS or h200:NODESxGPUS"),
        ("h200:16", "a node has 8 GPUs at most"),
        ("cpu:2x2", "expected cpu:DEVICES"),
        ("v5e:999x999", "at most 16,384 can be planned"),
    ],
)
def test_other_names_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_topology(text)


@pytest.mark.parametrize(("text", "extra"), [("v5e:4x4", "plan-tpu"), ("b200:8", "plan-gpu")])
def test_a_missing_compiler_is_one_line_with_what_to_install(monkeypatch, text, extra):
    monkeypatch.setattr(topology, "_is_there", lambda module: False)
    with pytest.raises(CompilerMissing, match=rf"is not installed: pip install 'jaxserve\[{extra}\]'"):
        check_compiler(read_topology(text))


def test_virtual_devices_need_no_compiler_and_described_ones_no_device():
    check_compiler(read_topology("cpu:4"))
    assert compiler_environment(read_topology("cpu:4")) == {"JAX_PLATFORMS": "cpu"}
    assert compiler_environment(read_topology("h200:8"))["JAX_PLATFORMS"] == "cpu"
    assert compiler_environment(read_topology("v5e:4x4"))["TPU_SKIP_MDS_QUERY"] == "1"


def test_every_kind_names_its_source_and_gpus_have_a_target():
    for name, device in device_kinds().items():
        assert device.source, name
        if device.platform == "cuda":
            spec = (topology._SPECS / f"{name}.txtpb").read_text()
            assert f"device_memory_size: {device.memory_bytes}" in spec
            assert f'name: "{device.kind}"' in spec


def test_the_network_counts_where_a_group_leaves_its_host():
    h200 = device_kinds()["h200"]
    inside, across = range(8), range(16)
    assert not h200.crosses_hosts(inside)
    assert h200.crosses_hosts(across)
    assert h200.wire_seconds("all-gather", inside, 4.5e9) == pytest.approx(0.01 + 7e-6)
    assert h200.wire_seconds("all-gather", across, 4.5e9) == pytest.approx(0.09 + 15e-6)
    assert h200.wire_seconds("all-gather", [0], 0.0) == 0.0
    assert not device_kinds()["v5p"].crosses_hosts(range(128))


def test_a_step_takes_the_longest_resource_and_waits_for_the_wire():
    work = StepWork(flops=9.89e12, hbm_bytes=4.8e10, wire_bytes=1.0, wire_seconds=0.004)
    time = step_time(work, device_kinds()["h200"], "bfloat16")
    assert (time.compute_seconds, time.memory_seconds) == pytest.approx((0.01, 0.01))
    assert time.seconds == pytest.approx(0.014)
    slow = StepWork(flops=1.0, hbm_bytes=1.0, wire_bytes=1.0, wire_seconds=0.004)
    assert step_time(slow, device_kinds()["h200"], "bfloat16").bound_by == "wire"


def test_small_sums():
    assert experts_met(256, 1, 8) == pytest.approx(8)
    assert experts_met(8, 1000, 2) == pytest.approx(8)
    assert cost_per_million(3.6, 8, 1000.0) == pytest.approx(8.0)


def test_decode_ceiling_of_llama_8b_on_an_h200():
    """8.03e9 parameters of two bytes at 4.8e12 bytes a second: the published rule of thumb, within 1 %."""
    assert decode_ceiling(2 * 8_030_000_000, device_kinds()["h200"]) == pytest.approx(298, rel=0.01)
