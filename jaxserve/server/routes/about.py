"""GET /version and /v1/config: what this server is and which choices it runs with."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import jaxserve
from jaxserve.server.serving import serving_of

router = APIRouter()


@router.get("/version")
async def version(request: Request) -> Response:
    """The installed version."""
    return JSONResponse({"version": jaxserve.__version__})


@router.get("/v1/config")
async def config(request: Request) -> Response:
    """The effective configuration: each choice with its value and its reason."""
    return JSONResponse(serving_of(request).frontend.effective_config())
