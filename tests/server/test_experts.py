"""The load of a mixture's experts over HTTP and in the metrics."""

import httpx
from fake_frontend import FakeExperts, FakeFrontend


def served(serve) -> tuple[str, FakeExperts]:
    frontend = FakeFrontend()
    frontend.experts = FakeExperts()
    return serve(frontend), frontend.experts


def test_load_and_rebalance(serve):
    base, experts = served(serve)
    assert httpx.get(f"{base}/v1/experts").json() == {
        "layers": [1, 3],
        "tokens": [[5, 1, 0], [2, 2, 2]],
        "device_tokens": [[6.0, 0.0], [4.0, 2.0]],
        "imbalance": [2.0, 4 / 3],
    }
    done = httpx.post(f"{base}/v1/experts/rebalance").json()
    assert done == {"moved": 3, "imbalance_before": [2.0, 4 / 3], "imbalance_after": [1.5, 1.0]}
    assert experts.num_moves == 1


def test_metrics(serve):
    base, _ = served(serve)
    lines = httpx.get(f"{base}/metrics").text.splitlines()
    assert 'jaxserve:expert_tokens_total{expert="0",layer="1",model_name="fake-model"} 5.0' in lines
    assert 'jaxserve:expert_imbalance{layer="1",model_name="fake-model"} 2.0' in lines


def test_a_dense_model_has_none(serve):
    base = serve(FakeFrontend())
    answer = httpx.get(f"{base}/v1/experts")
    assert answer.status_code == 400
    assert "no experts" in answer.json()["error"]["message"]
    assert "expert_" not in httpx.get(f"{base}/metrics").text
