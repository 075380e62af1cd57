"""GET /v1/experts: the load of a mixture's experts; POST /v1/experts/rebalance: moves them to even it out."""

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.metrics import ServedExperts
from jaxserve.server.serving import serving_of

router = APIRouter()


@router.get("/v1/experts")
async def load(request: Request) -> Response:
    """Tokens by layer, expert and device since the start, and the busiest device's over the mean."""
    report = await run_in_threadpool(_experts(request).load)
    return JSONResponse(
        {
            "layers": list(report.layers),
            "tokens": report.tokens.tolist(),
            "device_tokens": report.device_tokens.tolist(),
            "imbalance": report.imbalance.tolist(),
        }
    )


@router.post("/v1/experts/rebalance")
async def rebalance(request: Request) -> Response:
    """Moves experts; answers do not change."""
    done = await run_in_threadpool(_experts(request).rebalance)
    return JSONResponse(
        {
            "moved": done.moved,
            "imbalance_before": done.imbalance_before.tolist(),
            "imbalance_after": done.imbalance_after.tolist(),
        }
    )


def _experts(request: Request) -> ServedExperts:
    experts = serving_of(request).frontend.experts
    if experts is None:
        raise InvalidRequest("this model has no experts")
    return experts
