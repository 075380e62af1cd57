"""POST /v1/chat/completions."""

import time
import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.server.chat_answers import ChatAnswer, chat_events
from jaxserve.server.generation_group import submit_group
from jaxserve.server.logprob_shapes import TokenSpelling
from jaxserve.server.metrics import RequestClock
from jaxserve.server.prompts import chat_prompt
from jaxserve.server.protocol import ChatRequest
from jaxserve.server.request_body import read_request
from jaxserve.server.sampling_fields import chat_sampling
from jaxserve.server.serving import Serving, serving_of
from jaxserve.server.streaming import EventStream, unless_disconnected

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """A chat completion, whole or streamed."""
    serving = serving_of(request)
    clock = RequestClock(serving.metrics)
    body = await read_request(request, ChatRequest)
    answer = _answer_for(serving, body)
    params = chat_sampling(body, serving.frontend.tokenizer is not None, serving.frontend.sampling_defaults)
    prompt = await chat_prompt(serving.frontend, body, with_tools=body.tool_choice != "none")
    group = submit_group(
        serving,
        [prompt],
        params,
        clock=clock,
        request_id=answer.id,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    headers = {"X-Request-Id": answer.id}
    if body.stream:
        return EventStream(chat_events(group, answer, body.stream_options), group, headers)
    try:
        choices = await unless_disconnected(request.receive, group.collect())
        return JSONResponse(answer.whole(group, choices[0]), headers=headers)
    finally:
        group.close()


def _answer_for(serving: Serving, body: ChatRequest) -> ChatAnswer:
    return ChatAnswer(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=serving.model_for(body.model),
        spelling=TokenSpelling(tokenizer=serving.frontend.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
        num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        with_token_ids=bool(body.return_token_ids),
    )
