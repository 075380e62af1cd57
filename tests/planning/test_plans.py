"""Plans without a compiler: figures that are published, searches, advice, requests that cannot be, workers that die."""

import json
import os
from pathlib import Path

import pytest
from fixture_files import FIXTURES

from checkpoints.errors import CheckpointError
from jaxserve.errors import ConfigError
from jaxserve.planning import plans
from jaxserve.planning.analytic import device_pages, weight_parts
from jaxserve.planning.described_model import describe_model
from jaxserve.planning.plans import compile_plan
from jaxserve.planning.report import plan_report, planned
from jaxserve.planning.request import PlanRequest
from jaxserve.planning.search import ranked_plans

CONFIGS = FIXTURES / "configs"
KIB, GIB = 2**10, 2**30


def request_for(name: str, topology: str, tensor: int = 1, expert: int = 1, **options) -> PlanRequest:
    defaults: dict = {"context": 4096, "batch": 1}
    return PlanRequest(
        model=str(CONFIGS / name), topology=topology, tensor=tensor, expert=expert, **(defaults | options)
    )


def report_of(request: PlanRequest, facts: dict | None = None) -> dict:
    return plan_report(planned(request, describe_model(Path(request.model), request.weights)), facts or {}, None)


@pytest.mark.parametrize(
    ("name", "kib", "band"),
    [
        ("deepseek_v3", 68.6, 0.05),  # 61 layers x (512 + 64) x 2 bytes
        ("llama_3_8b", 128.0, 0.0),
        ("llama_3_70b", 320.0, 0.0),
    ],
)
def test_cache_bytes_per_token_are_those_published(name, kib, band):
    """In bfloat16, on one device; the band is the rounding of the published figure."""
    request = request_for(name, "h200:1")
    pages = device_pages(request, describe_model(CONFIGS / name, None))
    assert abs(pages.token_bytes / KIB - kib) <= band


@pytest.mark.parametrize(
    ("name", "billions", "band"),
    [
        ("deepseek_v3", 682.6, 0.1),
        ("llama_3_1_8b", 8.03, 0.01),
        ("llama_3_70b", 70.6, 0.1),
        ("mixtral_8x7b", 46.7, 0.1),
    ],
)
def test_parameters_are_as_many_as_published(name, billions, band):
    """DeepSeek-V3: 684.5B in its files, less the second copies of embedding and head (1.9B) that are not loaded."""
    assert abs(describe_model(CONFIGS / name, None).num_parameters / 1e9 - billions) <= band


def test_decode_rate_of_llama_8b_on_an_h200():
    """Published ceiling: about 298 tokens/s, all weights being read. A step reads one row of the embedding (7 % of the
    weights), and at this context the keys and values of 1,024 tokens (1 %): between 298 and 298 / 0.93."""
    rate = report_of(request_for("llama_3_1_8b", "h200:1", context=1024))["decode"]["tokens_per_second"]
    assert 298 < rate < 298 / 0.93


def test_weights_are_shared_out_and_filled_up():
    described = describe_model(CONFIGS / "llama_3_8b", None)
    sizes = {
        tensor: sum(part.num_bytes for part in weight_parts(request_for("llama_3_8b", "v5e:4x4", tensor), described))
        for tensor in (1, 8, 16)
    }
    norms = 4 * (32 * 2 + 1) * 4096  # in float32, on every device
    assert sizes[1] == 2 * (described.num_parameters - norms // 4) + norms
    assert sizes[8] - norms == (sizes[1] - norms) / 8
    copied = 2 * 32 * 2 * 4096 * 1024 / 16  # 8 kv heads for 16 devices: each twice
    assert sizes[16] - norms == (sizes[1] - norms) / 16 + copied


def test_packed_weights_take_the_bytes_of_their_format():
    plain, packed = (
        report_of(request_for("llama_3_8b", "h200:1", weights=weights))["per_device"]["weights_bytes"]
        for weights in ("bf16", "q8_0")
    )
    assert packed / plain == pytest.approx(34 / 64, rel=1e-3)  # blocks of 32 with a scale of two bytes


def test_experts_that_are_not_met_are_not_read():
    """Mixtral has 46.7e9 parameters and uses 12.9e9 for a token; XLA on a GPU reads all of them."""
    some = report_of(request_for("mixtral_8x7b", "v5p:2x2x1", 4, context=128))["decode"]["hbm_bytes"]
    every = report_of(request_for("mixtral_8x7b", "h200:4", 4, context=128))["decode"]["hbm_bytes"]
    assert some == pytest.approx(2 * 12.9e9 / 4, rel=0.02)  # but for the embedding, of which one row is read
    assert every == pytest.approx(2 * 46.7e9 / 4, rel=0.02)


def test_what_this_version_does_badly_is_said():
    def kinds(name, topology, **options):
        return {each["kind"] for each in report_of(request_for(name, topology, **options))["warnings"]}

    assert kinds("llama_3_8b", "h200:1") == kinds("mixtral_8x7b", "v5e:2x4") == set()
    assert kinds("mixtral_8x7b", "h200:1") == {"dense_experts"}
    assert kinds("llama_3_8b", "h200:1", weights="q8_0") == {"decoded_weights"}
    assert kinds("llama_3_8b", "cpu:1") == {"other_kernels"}
    assert kinds("llama_3_8b", "cpu:2", tensor=2) == set()


def test_what_does_not_fit_names_the_smallest_change():
    report = report_of(request_for("llama_3_70b", "v5e:4x4", 16, batch=64))
    assert not report["fits"]
    assert report["advice"].startswith("fewer tokens, --batch ")
    batch = int(report["advice"].split("--batch ")[1].split(";")[0])
    assert report_of(request_for("llama_3_70b", "v5e:4x4", 16, batch=batch))["fits"]
    too_heavy = report_of(request_for("llama_3_70b", "v5e:4x4", 8))
    assert "not even one page of cache is left beside the weights: 16 devices, -tp 16 -ep 1" in too_heavy["advice"]


def test_the_refusal_of_a_compiler_is_no_fit():
    refusal = {"refusal": {"reason": "RESOURCE_EXHAUSTED: 16.51G > 15.75G", "is_memory": True}}
    report = report_of(request_for("llama_3_8b", "v5e:4x4", 16), {"prefill": refusal, "decode": refusal})
    assert not report["fits"]
    assert report["failure"] is None
    assert "16.51G" in report["refusal"]
    other = {"refusal": {"reason": "INTERNAL: no", "is_memory": False}}
    report = report_of(request_for("llama_3_8b", "v5e:4x4", 16), {"prefill": other, "decode": other})
    assert (report["fits"], report["failure"]) == (False, "INTERNAL: no")


def test_advice_is_less_than_what_was_refused():
    """Also where arithmetic sees no reason for the refusal."""
    refusal = {"refusal": {"reason": "RESOURCE_EXHAUSTED", "is_memory": True}}
    facts = {"prefill": refusal, "decode": refusal}
    report = report_of(request_for("llama_3_8b", "v5e:4x4", 16, batch=8), facts)
    assert report["advice"].startswith("fewer tokens, --batch 7; or ")
    report = report_of(request_for("llama_3_8b", "v5e:4x4", 16, batch=1), facts)
    assert report["advice"].startswith("fewer tokens, --batch 1 --context 2048; or ")


def test_a_search_ranks_what_fits_first_and_uses_every_device():
    request = request_for("deepseek_v3", "v5p:4x4x8", batch=32)
    ranked = ranked_plans(request, describe_model(CONFIGS / "deepseek_v3", None))
    sizes = {(plan.request.tensor, plan.request.expert, plan.request.data) for plan in ranked}
    powers = [2**n for n in range(8)]
    groups = powers[:6]  # of data: no more than sequences
    assert sizes == {(t, e, d) for t in powers for e in powers for d in groups if t * e * d == 128}
    assert len(ranked) == len(sizes)
    reports = [plan_report(plan, {}, None) for plan in ranked]
    fits = [report["fits"] for report in reports]
    assert fits == sorted(fits, reverse=True)
    rates = [report["decode"]["tokens_per_second"] for report in reports if report["fits"]]
    assert rates == sorted(rates, reverse=True)


def test_a_search_of_a_dense_model_has_tensor_only_and_says_why_when_nothing_is_left():
    dense = describe_model(CONFIGS / "llama_3_8b", None)
    found = ranked_plans(request_for("llama_3_8b", "h200:8", batch=2), dense)
    assert {(plan.request.tensor, plan.request.expert, plan.request.data) for plan in found} == {(8, 1, 1), (4, 1, 2)}
    packed = describe_model(CONFIGS / "llama_3_8b", "q8_0")  # its heads would have to be filled up
    with pytest.raises(ConfigError, match="no plan over all devices can cut this model"):
        ranked_plans(request_for("llama_3_8b", "h200:7"), packed)


def test_data_groups_share_experts_and_have_caches_of_their_own():
    """DeepSeek's deployment: attention in data groups, experts over all of them."""
    described = describe_model(CONFIGS / "deepseek_v3", None)
    wide = planned(request_for("deepseek_v3", "v5p:4x4x8", 1, 4, data=32, batch=128), described)
    narrow = planned(request_for("deepseek_v3", "v5p:4x4x8", 1, 128, batch=128), described)
    assert wide.weights_bytes == narrow.weights_bytes
    assert wide.kv_cache_bytes * 32 == narrow.kv_cache_bytes
    report = plan_report(wide, {}, None)
    assert report["plan"] == {"tensor": 1, "expert": 4, "data": 32}
    kinds = {each["kind"] for each in report["collectives"]}
    assert kinds == {"all-reduce", "all-gather", "reduce-scatter"}


def test_layers_with_a_window_hold_less():
    """gemma3's fixture: most layers see a window only; its pages are the engine's."""
    described = describe_model(FIXTURES / "models" / "gemma3_text", None)
    request = request_for("llama_3_8b", "cpu:1", context=64, batch=2, num_tokens=16, page_size=4)
    pages = planned(request, described).pages
    assert pages.groups is not None
    assert pages.sequence_pages < pages.groups.num_groups * pages.max_pages
    assert pages.tokens_in(pages.sequence_pages) == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"batch": 64, "num_tokens": 32}, "--max-num-batched-tokens 32 is below --batch 64: a step must hold"),
        ({"batch": 65, "num_tokens": 32, "data": 2}, r"is below --batch 33 \(each of 2 data groups\): a step must"),
        ({"tensor": 4, "expert": 4}, "tensor 4 x expert 4 needs 16 devices and cpu:4 has 4"),
    ],
)
def test_requests_that_cannot_be_are_refused(options, message):
    sizes = {"tensor": options.pop("tensor", 1), "expert": options.pop("expert", 1)}
    with pytest.raises(ConfigError, match=message):
        request_for("llama_3_8b", "cpu:4", **sizes, **options).check()


def test_a_context_beyond_the_model_is_refused():
    request = request_for("llama_3_8b", "cpu:4", context=10_000)
    with pytest.raises(ConfigError, match="--context 10,000 exceeds the 8,192 positions"):
        request.check_model(describe_model(CONFIGS / "llama_3_8b", None).config)


def test_models_may_be_a_config_a_folder_or_a_gguf():
    alone = describe_model(CONFIGS / "mixtral_8x7b" / "config.json", None)
    assert not alone.has_weights
    folder = describe_model(FIXTURES / "models" / "llama_bf16_sharded", None)
    assert (folder.has_weights, folder.format_of("layers.0.attention.q")) == (True, "BF16")
    (gguf,) = (FIXTURES / "gguf" / "gguf_llama_kquants").glob("*.gguf")
    assert describe_model(gguf, None).format_of("layers.0.attention.q") not in ("BF16", "F32")
    assert describe_model(gguf, "bf16").format_of("layers.0.attention.q") == "BF16"


def test_what_is_no_model_or_no_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--weights fp8: expected one of"):
        describe_model(CONFIGS / "llama_3_8b", "fp8")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": []}))
    with pytest.raises(CheckpointError, match=r"architectures is .*, not a list of names"):
        describe_model(tmp_path, None)
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(CheckpointError, match=r"expected a GGUF file, a folder, or a config\.json"):
        describe_model(tmp_path / "model.bin", None)


def test_a_compiler_that_takes_too_long_is_ended():
    facts = compile_plan(request_for("llama_3_8b", "cpu:4"), os.environ, 0.05)
    assert facts == {"failure": "compiling took longer than 0 s (--time-limit)"}
    report = report_of(request_for("llama_3_8b", "cpu:4", context=64), facts)
    assert (report["fits"], report["is_compiled"]) == (False, False)


def test_a_compiler_that_aborts_is_reported(monkeypatch):
    monkeypatch.setattr(plans, "WORKER", "aborting_worker")
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    facts = compile_plan(request_for("llama_3_8b", "cpu:4"), here)
    how = "the compiler's process was ended by SIGABRT: F0000 wgmma: the compiler has had enough"
    assert facts == {"failure": how}
