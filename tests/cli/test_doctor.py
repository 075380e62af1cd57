"""The doctor finds what is wrong, goes on after it, and says so in its exit code."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.cli import doctor, self_test
from jaxserve.cli.doctor import Finding
from jaxserve.config import EngineConfig
from pallas_kernels.kernels import REFERENCE, XLA
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.rope import split_and_rotate

CONFIG = EngineConfig(model="smollm2-135m-instruct")
TINY = Case(name="tiny", num_heads=4, num_kv_heads=2, head_size=8, page_size=4, rows=((5, 9), (1, 6)))


def _good(config: EngineConfig) -> Iterator[Finding]:
    yield Finding(name="good", status="ok", detail="fine")


def check_a_thing(config: EngineConfig) -> Iterator[Finding]:
    yield Finding(name="half", status="ok", detail="fine")
    raise ValueError("broken")


def test_a_check_that_breaks_is_a_failure_and_the_next_goes_on():
    findings = list(doctor.examine(CONFIG, (check_a_thing, _good)))
    assert [(finding.name, finding.status) for finding in findings] == [
        ("half", "ok"),
        ("a thing", "fail"),
        ("good", "ok"),
    ]
    assert findings[1].detail == "ValueError: broken"


def test_the_exit_code_tells(run, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (_good,))
    assert run("doctor").code == 0
    monkeypatch.setattr(doctor, "CHECKS", (_good, check_a_thing))
    ran = run("doctor")
    assert ran.code == 1
    assert ran.out.splitlines()[0].split() == ["ok", "good", "fine"]
    assert ran.out.splitlines()[-1] == "failed: a thing"
    ran = run("doctor", "--json")
    result = json.loads(ran.out)
    assert (ran.code, result["ok"]) == (1, False)
    assert result["findings"][0] == {"name": "good", "status": "ok", "detail": "fine"}


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("0.12.0.1", "<0.13,>=0.11.2", True),
        ("0.11.2", "<0.13,>=0.11.2", True),
        ("0.11.1", "<0.13,>=0.11.2", False),
        ("0.13.0", "<0.13,>=0.11.2", False),
        ("0.13", "<0.13.0", False),
        ("3.12.1", ">=3.12", True),
        ("10.0", ">=9.5", True),
        ("1.0rc1", "", True),
    ],
)
def test_versions_are_compared_by_number(version, wanted, fits):
    assert doctor.version_fits(version, wanted) is fits


def test_requirements_are_split():
    split = doctor.split_requirement
    assert split("jax<0.13,>=0.11.2") == ("jax", "<0.13,>=0.11.2", "")
    assert split('jax[cuda13]>=0.11.2; extra == "cuda13"') == ("jax", ">=0.11.2", 'extra == "cuda13"')
    assert split("orbax-checkpoint (>=0.12)") == ("orbax-checkpoint", ">=0.12", "")


def test_this_installation_has_what_it_needs():
    findings = [*doctor.check_python(CONFIG), *doctor.check_packages(CONFIG)]
    assert {"python", "jax", "jaxlib", "numpy"} <= {finding.name for finding in findings}
    assert [finding for finding in findings if finding.status != "ok"] == []


def test_a_missing_and_an_old_package_are_found(monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["no-such-package>=1", "numpy<1"])
    missing, old = doctor.check_packages(CONFIG)
    assert (missing.status, missing.detail) == ("fail", "not installed; needed: >=1")
    assert old.status == "fail"


def test_cpu_facts(tmp_path):
    (tmp_path / "cpuinfo").write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16 sse\n\nprocessor\t: 1\n")
    assert doctor.cpu_facts(tmp_path / "cpuinfo") == ("Some CPU", ("avx2", "amx_bf16"))
    assert doctor.cpu_facts(tmp_path / "none") == (os.uname().machine, ())


def test_caches_are_measured_and_tried(tmp_path):
    (tmp_path / "file").write_text("12345")
    (tmp_path / "wall").write_text("")
    config = dataclasses.replace(CONFIG, cache_dir=tmp_path, compilation_cache_dir=tmp_path / "wall" / "xla")
    good, bad = doctor.check_caches(config)
    assert (good.status, good.detail) == ("ok", f"{tmp_path}, 2 files, 5 bytes")
    assert bad.status == "fail"
    assert "cannot be written: Not a directory" in bad.detail


def test_devices_are_listed():
    [device] = doctor.check_devices(CONFIG)
    assert (device.name, device.status) == ("device 0", "ok")
    assert device.detail.startswith("cpu")


def test_right_kernels_pass(monkeypatch):
    monkeypatch.setattr(self_test, "CASES", (TINY,))
    findings = list(doctor.check_kernels(CONFIG))
    assert findings[0].name == "attention tiny"
    assert {finding.name for finding in findings} >= {"matmul Q4_1", "matmul BF16"}
    assert [finding for finding in findings if finding.status != "ok"] == []


@pytest.mark.parametrize("factor", [1.001, math.nan])
def test_wrong_kernels_fail(monkeypatch, factor):
    wrong = dataclasses.replace(
        XLA,
        paged_attention=lambda *args, **options: REFERENCE.paged_attention(*args, **options) * factor,
        quantized_matmul=lambda x, weight: REFERENCE.quantized_matmul(x, weight) * factor,
    )
    monkeypatch.setattr(self_test, "CASES", (TINY,))
    monkeypatch.setattr("pallas_kernels.kernels.kernels_for", lambda name, platform: (wrong, "a test"))
    findings = list(doctor.check_kernels(CONFIG))
    assert {finding.status for finding in findings} == {"fail"}


def _queries(qkv, heads):
    return split_and_rotate(qkv, **heads)[0]


def test_cpu_kernels_that_pass_are_named():
    config = dataclasses.replace(CONFIG, compilation_cache_dir=Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))
    [finding] = doctor.check_cpu_kernels(config)
    assert (finding.name, finding.status) == ("cpu kernels", "ok")
    assert "Q4_1, Q8_0 and attention pass" in finding.detail


def test_cpu_kernels_that_cannot_be_had_fail_with_the_reason():
    [finding] = doctor.check_cpu_kernels(dataclasses.replace(CONFIG, page_size=8))
    assert (finding.status, finding.detail) == ("fail", "page size 8 is no multiple of 16, as the CPU kernels need")
    assert list(doctor.check_cpu_kernels(dataclasses.replace(CONFIG, kernels="xla"))) == []


def test_a_write_that_misses_is_seen(monkeypatch):
    monkeypatch.setattr(self_test, "CASES", (TINY,))
    wrong = dataclasses.replace(XLA, rope_write_kv=lambda qkv, pages, *args, **heads: (_queries(qkv, heads), pages))
    assert self_test.attention_errors(wrong)["tiny"] > self_test.ATTENTION_TOLERANCE


def test_a_model_that_is_not_here_is_skipped_and_not_fetched(tmp_path, starts):
    [finding] = doctor.check_model(dataclasses.replace(CONFIG, cache_dir=tmp_path))
    assert (finding.status, finding.detail) == (
        "skip",
        "smollm2-135m-instruct is not here: jaxserve pull smollm2-135m-instruct",
    )
    assert starts.configs == []


@pytest.mark.parametrize(("reason", "status"), [("length", "ok"), ("error", "fail")])
def test_a_model_that_is_here_says_some_tokens(tmp_path, starts, reason, status):
    (tmp_path / "m.gguf").write_bytes(b"x")
    starts.frontend.finish_reason = reason
    config = dataclasses.replace(CONFIG, model=str(tmp_path / "m.gguf"), cache_dir=tmp_path)
    file, step = doctor.check_model(config)
    assert file.detail.startswith(f"{tmp_path / 'm.gguf'}, 1 bytes, sha256 2d711642")
    assert (step.name, step.status) == ("model step", status)
    assert "'one two three four'" in step.detail
    assert (starts.configs[0].max_num_seqs, starts.configs[0].max_model_len) == (1, doctor.TRIAL_MODEL_LEN)
    assert starts.frontend.num_closed == 1
