"""POST /v1/completions."""

import time
import uuid
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.server.completion_answers import CompletionAnswer, completion_events
from jaxserve.server.generation_group import submit_group
from jaxserve.server.logprob_shapes import TokenSpelling
from jaxserve.server.metrics import RequestClock
from jaxserve.server.prompts import Prompt, completion_prompts
from jaxserve.server.protocol import CompletionRequest
from jaxserve.server.request_body import read_request
from jaxserve.server.sampling_fields import completion_sampling
from jaxserve.server.serving import Serving, serving_of
from jaxserve.server.streaming import EventStream, unless_disconnected

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Text completions of one or several prompts, whole or streamed."""
    serving = serving_of(request)
    clock = RequestClock(serving.metrics)
    body = await read_request(request, CompletionRequest)
    model = serving.model_for(body.model)
    frontend = serving.frontend
    params = completion_sampling(body, frontend.tokenizer is not None, frontend.sampling_defaults)
    prompts = await completion_prompts(serving.frontend, body.prompt, body.add_special_tokens is not False)
    answer = _answer_for(serving, body, model, prompts)
    group = submit_group(
        serving,
        [prompt.token_ids for prompt in prompts],
        params,
        clock=clock,
        request_id=answer.id,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    headers = {"X-Request-Id": answer.id}
    if body.stream:
        return EventStream(completion_events(group, answer, body.stream_options), group, headers)
    try:
        choices = await unless_disconnected(request.receive, group.collect())
        return JSONResponse(answer.whole(group, choices), headers=headers)
    finally:
        group.close()


def _answer_for(serving: Serving, body: CompletionRequest, model: str, prompts: Sequence[Prompt]) -> CompletionAnswer:
    return CompletionAnswer(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        prompts=prompts,
        spelling=TokenSpelling(tokenizer=serving.frontend.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
        num_top_logprobs=body.logprobs,
        with_echo=bool(body.echo),
        with_prompt_logprobs=body.prompt_logprobs is not None,
        with_token_ids=bool(body.return_token_ids),
        is_scoring=body.max_tokens == 0,
    )
