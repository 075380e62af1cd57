"""POST /tokenize and /detokenize, with vLLM's shapes."""

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.prompts import chat_prompt, encode_text
from jaxserve.server.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizePromptRequest
from jaxserve.server.request_body import read_json, read_request, validated
from jaxserve.server.serving import Serving, TokenText, serving_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a text or of messages, as a generation would get them."""
    serving = serving_of(request)
    value = await read_json(request)
    if "messages" in value:
        chat = validated(value, TokenizeChatRequest)
        serving.model_for(chat.model)
        token_ids = await chat_prompt(serving.frontend, chat)
        return _tokens_answer(serving, token_ids, bool(chat.return_token_strs))
    text = validated(value, TokenizePromptRequest)
    serving.model_for(text.model)
    token_ids = await encode_text(serving.frontend, text.prompt, text.add_special_tokens is not False)
    return _tokens_answer(serving, token_ids, bool(text.return_token_strs))


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    serving = serving_of(request)
    body = await read_request(request, DetokenizeRequest)
    serving.model_for(body.model)
    tokenizer = _tokenizer_of(serving)
    for token_id in body.tokens:
        if token_id >= tokenizer.vocab_size:
            raise InvalidRequest(f"token id {token_id} is not below {tokenizer.vocab_size}", param="tokens")
    text = await run_in_threadpool(tokenizer.decode, body.tokens, skip_special=False)
    return JSONResponse({"prompt": text})


def _tokens_answer(serving: Serving, token_ids: list[int], with_strings: bool) -> Response:
    strings = None
    if with_strings:
        tokenizer = _tokenizer_of(serving)
        strings = [tokenizer.token_text(token_id) for token_id in token_ids]
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": serving.frontend.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


def _tokenizer_of(serving: Serving) -> TokenText:
    if serving.frontend.tokenizer is None:
        raise InvalidRequest("this model was loaded without a tokenizer; only token ids work")
    return serving.frontend.tokenizer
