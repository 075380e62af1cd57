"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.server.serving import Serving, serving_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """One entry per served name."""
    serving = serving_of(request)
    return JSONResponse({"object": "list", "data": [_model_card(serving, name) for name in serving.model_names]})


@router.get("/v1/models/{model_id:path}")  # names such as org/model hold a slash
async def get_model(request: Request, model_id: str) -> Response:
    """The entry of one served name."""
    serving = serving_of(request)
    return JSONResponse(_model_card(serving, serving.model_for(model_id)))


def _model_card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "jaxserve",
        "root": serving.frontend.model_name,
        "parent": None,
        "max_model_len": serving.frontend.max_model_len,
    }
