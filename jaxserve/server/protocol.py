"""The request bodies this server accepts: OpenAI's fields, vLLM's extra ones, and nothing else.

A field that is not listed is refused by name; null stands for the default. Ranges of sampling values are checked by
SamplingParams. Fields that only describe the caller and change no answer are accepted and ignored; they are the ones
of `HarmlessFields`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import MAX_LOGPROBS

TEMPLATE_FIELDS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "self"}
)


class RequestFields(BaseModel):
    """Strict: no unknown fields, no conversion between types, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    model: str | None = None


class HarmlessFields(RequestFields):
    """What OpenAI clients may send that has no meaning here; values that would ask for something are refused."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    modalities: list[Literal["text"]] | None = None


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the usage; continuous_usage_stats: running usage in every chunk."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _stop_strings(stop: object) -> object:
    """Refuses wrong types in one sentence, where pydantic would name the branches of the union."""
    if stop is None or isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(s, str) for s in stop)):
        return stop
    raise InvalidRequest(f"stop must be a string or a list of strings, got {stop!r:.100}", param="stop")


class GenerationFields(HarmlessFields):
    """What chat and text completions have in common."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, BeforeValidator(_stop_strings)] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "GenerationFields":
        if self.stream_options and not self.stream:
            raise InvalidRequest("stream_options needs stream=true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed; send stream=false", param="prompt_logprobs")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise InvalidRequest(
                f"response_format type {kind!r} is not supported yet; only 'text' is", param="response_format"
            )
        return self


def _text_of_parts(content: object) -> object:
    """Message content as one string: text parts are joined by line ends, as vLLM does for most templates."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"messages: content must be a string or a list of parts, got {content!r:.100}", param="messages"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequest(
                f"messages: content part type {kind!r} is not supported; only 'text' is", param="messages"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest("messages: a content part of type 'text' needs a string 'text'", param="messages")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(BaseModel):
    """One message. Further keys (tool_calls, name, reasoning_content, ...) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: Annotated[str | None, BeforeValidator(_text_of_parts)] = None

    @model_validator(mode="after")
    def _check_content(self) -> "ChatMessage":
        if self.content is None and not (self.model_extra or {}).get("tool_calls"):
            raise InvalidRequest(f"messages: the message of role {self.role!r:.40} has no content", param="messages")
        return self


class TemplateFields(RequestFields):
    """What decides how messages become a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_template(self) -> "TemplateFields":
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        reserved = TEMPLATE_FIELDS.intersection(self.chat_template_kwargs or {})
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs must not hold {', '.join(sorted(reserved))}", param="chat_template_kwargs"
            )
        return self


class ChatRequest(TemplateFields, GenerationFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Any = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                f"tool_choice must be 'none' or 'auto', got {self.tool_choice!r:.100}", param="tool_choice"
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: Any = Field()
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest(f"best_of must equal n ({self.n or 1}), got {self.best_of}", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens 0 needs echo=true (to score the prompt)", param="max_tokens")
        if self.stream and self.echo and self.max_tokens == 0:
            raise InvalidRequest("scoring (echo with max_tokens 0) cannot be streamed", param="stream")
        return self


class EmbeddingRequest(RequestFields):
    """POST /v1/embeddings. input: text, token ids, or a list of either. pooling, normalize, add_special_tokens,
    priority and cache_salt are ours and vLLM's, the others OpenAI's; `user` changes nothing."""

    input: Any = Field()
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class TokenizePromptRequest(RequestFields):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(TemplateFields):
    """POST /tokenize with messages. Special tokens come from the template alone."""

    add_special_tokens: Literal[False] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestFields):
    """POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0)]]
