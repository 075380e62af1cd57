"""Health, metrics, configuration and version."""

import httpx
import pytest
from fake_frontend import FakeFrontend

import jaxserve

COUNTED = {
    'jaxserve:num_requests_running{model_name="fake-model"}': 1,
    'jaxserve:num_requests_waiting{model_name="fake-model"}': 2,
    'jaxserve:kv_cache_usage_perc{model_name="fake-model"}': 0.25,
    'jaxserve:prompt_tokens_total{model_name="fake-model"}': 11,
    'jaxserve:generation_tokens_total{model_name="fake-model"}': 22,
    'jaxserve:prefix_cache_queries_total{model_name="fake-model"}': 33,
    'jaxserve:prefix_cache_hits_total{model_name="fake-model"}': 16,
    'jaxserve:num_preemptions_total{model_name="fake-model"}': 4,
    'jaxserve:num_window_pages_freed_total{model_name="fake-model"}': 11,
    'jaxserve:compiles_after_ready_total{model_name="fake-model"}': 0,
    'jaxserve:request_success_total{finished_reason="stop",model_name="fake-model"}': 3,
    'jaxserve:request_success_total{finished_reason="length",model_name="fake-model"}': 7,
}


def samples(base: str) -> dict[str, float]:
    answer = httpx.get(f"{base}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_engine_figures(serve):
    found = samples(serve(FakeFrontend()))
    assert {name: found[name] for name in COUNTED} == COUNTED


@pytest.mark.parametrize("stream", [False, True])
def test_latencies_and_http_counts(serve, stream):
    base = serve(FakeFrontend())
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "stream": stream}
    httpx.post(f"{base}/v1/completions", json=body)
    httpx.post(f"{base}/v1/completions", json={})
    httpx.get(f"{base}/v1/models/fake-model")
    httpx.get(f"{base}/random/path")
    found = samples(base)
    label = '{model_name="fake-model"}'
    assert found[f"jaxserve:time_to_first_token_seconds_count{label}"] == 1
    assert found[f"jaxserve:inter_token_latency_seconds_count{label}"] == 4 * 4
    assert found[f"jaxserve:e2e_request_latency_seconds_count{label}"] == 1
    http = "jaxserve:http_requests_total"
    assert found[f'{http}{{method="POST",route="/v1/completions",status="200"}}'] == 1
    assert found[f'{http}{{method="POST",route="/v1/completions",status="400"}}'] == 1
    assert found[f'{http}{{method="GET",route="/v1/models/{{model_id:path}}",status="200"}}'] == 1
    assert found[f'{http}{{method="any",route="unmatched",status="404"}}'] == 1


def test_which_kernels_serve(serve):
    class FellBack(FakeFrontend):
        def effective_config(self) -> dict[str, dict]:
            return {
                "kernels": {"value": "xla", "reason": "r"},
                "kernel_fallback": {"value": "compiler", "reason": "r"},
            }

    class OnCpu(FakeFrontend):
        def effective_config(self) -> dict[str, dict]:
            return {"kernels": {"value": "cpu", "reason": "r"}, "cpu_level": {"value": "avx2", "reason": "r"}}

    fallback = 'jaxserve:kernel_fallbacks_total{model_name="fake-model",reason="compiler"}'
    fell_back, on_cpu = samples(serve(FellBack())), samples(serve(OnCpu()))
    assert fell_back['jaxserve:kernels_info{kernels="xla",level="",model_name="fake-model"}'] == 1
    assert fell_back[fallback] == 1
    assert on_cpu['jaxserve:kernels_info{kernels="cpu",level="avx2",model_name="fake-model"}'] == 1
    assert fallback not in on_cpu


def test_two_apps_have_two_registries(serve):
    first, second = serve(FakeFrontend()), serve(FakeFrontend())
    httpx.post(f"{first}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    name = 'jaxserve:e2e_request_latency_seconds_count{model_name="fake-model"}'
    assert (samples(first)[name], samples(second)[name]) == (1, 0)


def test_health(serve):
    frontend = FakeFrontend()
    base = serve(frontend)
    assert httpx.get(f"{base}/health").json() == {"status": "ok"}
    assert httpx.head(f"{base}/health").status_code == 200
    frontend.is_ready = False
    assert httpx.get(f"{base}/health").status_code == 503
    frontend.failure = RuntimeError("x")
    assert httpx.get(f"{base}/health").json() == {"status": "engine_died"}


def test_about(serve):
    base = serve(FakeFrontend(), served_model_names=("a", "b/c"))
    assert httpx.get(f"{base}/version").json() == {"version": jaxserve.__version__}
    assert httpx.get(f"{base}/v1/config").json() == {"page_tokens": {"value": 16, "reason": "default"}}
    cards = httpx.get(f"{base}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["a", "b/c"]
    assert cards[0]["root"] == "fake-model"
    assert cards[0]["max_model_len"] == 2048
    assert httpx.get(f"{base}/v1/models/b/c").json() == cards[1]
