"""From the fields of a request body to SamplingParams. `defaults`: the model's own, for fields that are not named."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol import ChatRequest, CompletionRequest, GenerationFields

_OWN_MEANING = frozenset({"logit_bias", "logprobs", "max_tokens", "prompt_logprobs", "detokenize"})


def chat_sampling(body: ChatRequest, has_tokenizer: bool, defaults: Mapping[str, float | int]) -> SamplingParams:
    """Sampling of a chat request: no token limit by default, logprobs counted by top_logprobs."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return SamplingParams(
        **_plain_fields(body, has_tokenizer, defaults),
        max_tokens=defaults.get("max_tokens") if limit is None else limit,  # type: ignore[arg-type]
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def completion_sampling(
    body: CompletionRequest, has_tokenizer: bool, defaults: Mapping[str, float | int]
) -> SamplingParams:
    """Sampling of a text completion: 16 tokens by default; echo with logprobs asks for the prompt's logprobs too.

    max_tokens 0 (scoring) becomes 1, because an engine step always samples; the route drops what was sampled.
    """
    scored = body.logprobs if body.echo else None
    limit: dict[str, Any] = {name: value for name, value in defaults.items() if name == "max_tokens"}
    if body.max_tokens is not None:
        limit["max_tokens"] = max(body.max_tokens, 1)
    if body.max_tokens is not None and body.max_tokens < 0:
        raise InvalidRequest(f"max_tokens must be 0 or more, got {body.max_tokens}", param="max_tokens")
    wanted = [count for count in (body.prompt_logprobs, scored) if count is not None]
    return SamplingParams(
        **_plain_fields(body, has_tokenizer, defaults),
        **limit,
        logprobs=body.logprobs,
        prompt_logprobs=max(wanted, default=None),
    )


def _plain_fields(body: GenerationFields, has_tokenizer: bool, defaults: Mapping[str, float | int]) -> dict[str, Any]:
    """The fields that SamplingParams knows by the same name and that the caller, or else the model, set."""
    names = SamplingParams.names() - _OWN_MEANING
    given: dict[str, Any] = {name: value for name, value in defaults.items() if name in names}
    given |= {name: value for name in names if (value := getattr(body, name)) is not None}
    given["logit_bias"] = _bias_by_id(body.logit_bias)
    given["detokenize"] = has_tokenizer
    return given


def _bias_by_id(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON object keys are strings; OpenAI's are token ids in decimal."""
    if bias is None:
        return None
    for key in bias:
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise InvalidRequest(f"logit_bias keys must be token ids, got {key!r:.40}", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
