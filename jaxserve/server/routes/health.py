"""GET /health and /metrics: what watches the server. Both are open without an API key."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.server.serving import Serving, serving_of

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """200 while requests are served; 503 when the engine died, is not ready, or drains."""
    state = health_state(serving_of(request))
    return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    text = await run_in_threadpool(generate_latest, serving_of(request).metrics.registry)  # it may ask the engine
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def health_state(serving: Serving) -> str:
    """One word for what the server can do now: ok, engine_died, draining or not_ready."""
    if serving.frontend.failure is not None:
        return "engine_died"
    if serving.is_draining:
        return "draining"
    return "ok" if serving.frontend.is_ready else "not_ready"
