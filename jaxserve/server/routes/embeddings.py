"""POST /v1/embeddings: vectors of texts, with OpenAI's shapes."""

import base64
import struct
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import InvalidRequest, ShuttingDown
from jaxserve.pooling_params import PoolingParams
from jaxserve.server.generation_group import GenerationGroup, submit_embeddings
from jaxserve.server.metrics import RequestClock
from jaxserve.server.prompts import completion_prompts
from jaxserve.server.protocol import EmbeddingRequest
from jaxserve.server.request_body import read_request
from jaxserve.server.serving import ServedFrontend, serving_of
from jaxserve.server.streaming import unless_disconnected

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """One vector for each input, of length 1 unless normalize is false."""
    serving = serving_of(request)
    clock = RequestClock(serving.metrics)
    body = await read_request(request, EmbeddingRequest)
    model = serving.model_for(body.model)
    params = _pooling_params(body, serving.frontend.embedding_size)
    request_id = f"embd-{uuid.uuid4().hex}"
    with _named_input():
        group = submit_embeddings(
            serving,
            await _inputs(serving.frontend, body),
            params.pooling,
            clock=clock,
            request_id=request_id,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
    try:
        await unless_disconnected(request.receive, group.collect())
        vectors = [params.embedding(pooled) for pooled in _pooled(group)]
    finally:
        group.close()
    answer = _answer(vectors, model, group.num_prompt_tokens, as_base64=body.encoding_format == "base64")
    return JSONResponse(answer, headers={"X-Request-Id": request_id})


def _pooling_params(body: EmbeddingRequest, embedding_size: int) -> PoolingParams:
    params = PoolingParams(
        pooling=body.pooling or "mean", normalize=body.normalize is not False, dimensions=body.dimensions
    )
    params.check(embedding_size)
    return params


async def _inputs(frontend: ServedFrontend, body: EmbeddingRequest) -> list[list[int]]:
    """Token ids of each input. An empty text has nothing to embed, though a BOS would be put before it."""
    if body.input == "" or (isinstance(body.input, list) and "" in body.input):
        raise InvalidRequest("input must not be an empty string, nor hold one", param="input")
    prompts = await completion_prompts(frontend, body.input, body.add_special_tokens is not False, field="input")
    return [prompt.token_ids for prompt in prompts]


@contextmanager
def _named_input() -> Iterator[None]:
    """What the engine calls a prompt is this route's `input`."""
    try:
        yield
    except InvalidRequest as error:
        error.param = "input" if error.param == "prompt" else error.param
        raise


def _pooled(group: GenerationGroup) -> Iterator[list[float]]:
    """Each input's pooled hidden states. Raises ShuttingDown for those a shutdown aborted."""
    for generation in group.generations:
        if generation.pooled is None:
            raise ShuttingDown("the server shut down before all inputs were embedded; try again")
        yield generation.pooled


def _answer(vectors: Sequence[list[float]], model: str, num_tokens: int, *, as_base64: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    data = [
        {"object": "embedding", "index": index, "embedding": _little_endian(vector) if as_base64 else vector}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _little_endian(vector: list[float]) -> str:
    """float32 values in base64, as OpenAI's client unpacks them."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
