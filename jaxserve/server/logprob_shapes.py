"""Logprobs in the three shapes clients expect: chat's, text completions', and vLLM's prompt_logprobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.outputs import Logprob
from jaxserve.server.serving import TokenText

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM sends the same number


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpelling:
    """How tokens are written in answers. as_ids: "token_id:123", which unlike the text is never ambiguous."""

    tokenizer: TokenText | None
    as_ids: bool = False

    def text(self, token_id: int, logprob: Logprob | None = None) -> str:
        """The token as a string."""
        if not self.as_ids and logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int] | None:
        """The token's UTF-8 bytes, which may be part of a character only."""
        return None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))

    def num_characters(self, token_id: int) -> int:
        """Characters that begin in this token: exact also where a character spans tokens."""
        if self.tokenizer is None:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.tokenizer.token_bytes(token_id))


def chat_logprobs(
    spelling: TokenSpelling, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], num_top: int
) -> dict[str, Any]:
    """The chat API's `logprobs` object for these tokens."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        chosen = _chat_token(spelling, token_id, entry[token_id])
        chosen["top_logprobs"] = [_chat_token(spelling, i, logprob) for i, logprob in _top(entry, num_top)]
        content.append(chosen)
    return {"content": content, "refusal": None}


def completion_logprobs(
    spelling: TokenSpelling,
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob] | None],
    num_top: int,
    *,
    offset: int = 0,
    num_unwritten: int = 0,
) -> tuple[dict[str, list], int]:
    """The text API's `logprobs` object for these tokens, and the character offset behind them.

    An entry is None for the first token of a prompt. num_unwritten: leading tokens (a BOS) that are not in the text.
    """
    shape: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for i, (token_id, entry) in enumerate(zip(token_ids, logprobs, strict=True)):
        chosen = None if entry is None else entry[token_id]
        shape["tokens"].append(spelling.text(token_id, chosen))
        shape["token_logprobs"].append(None if chosen is None else _finite(chosen.logprob))
        shape["top_logprobs"].append(None if entry is None else _by_text(spelling, entry, token_id, num_top))
        shape["text_offset"].append(offset)
        offset += spelling.num_characters(token_id) if i >= num_unwritten else 0
    return shape, offset


def prompt_logprobs_shape(
    spelling: TokenSpelling, logprobs: Sequence[dict[int, Logprob] | None]
) -> list[dict[str, dict] | None]:
    """vLLM's prompt_logprobs: per prompt token, token id -> logprob, rank and text."""
    return [
        None
        if entry is None
        else {
            str(i): {"logprob": _finite(lp.logprob), "rank": lp.rank, "decoded_token": spelling.text(i, lp)}
            for i, lp in entry.items()
        }
        for entry in logprobs
    ]


def _chat_token(spelling: TokenSpelling, token_id: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "token": spelling.text(token_id, logprob),
        "logprob": _finite(logprob.logprob),
        "bytes": spelling.bytes_of(token_id),
    }


def _top(entry: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The num_top best of an entry, which holds the chosen token too and therefore may hold one more."""
    if not num_top:
        return []
    return sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]


def _by_text(spelling: TokenSpelling, entry: dict[int, Logprob], chosen: int, num_top: int) -> dict[str, float]:
    """Text -> logprob with the chosen token always in it; of tokens with equal text the likeliest counts."""
    shape: dict[str, float] = {}
    for token_id, logprob in [*_top(entry, num_top), (chosen, entry[chosen])]:
        text, value = spelling.text(token_id, logprob), _finite(logprob.logprob)
        shape[text] = max(value, shape.get(text, value))
    return shape


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
