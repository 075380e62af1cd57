"""How one request wants its tokens chosen. Names and defaults are vLLM's, so that code moves over unchanged."""

import math
from dataclasses import dataclass, field, fields

from jaxserve.errors import InvalidRequest

MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_LOGIT_BIAS = 300  # OpenAI's limit for logit_bias entries
MAX_STOP_TOKEN_IDS = 64
MAX_N = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling choices of one request, checked on construction.

    temperature: 0 is greedy. top_k: 0 or -1 keeps all tokens. top_p, min_p: probability cut-offs after top_k.
    logprobs: number of alternatives per generated token (0: only the chosen one); prompt_logprobs: same for the
    prompt. seed: any integer; two equal requests with a seed get equal tokens whatever runs beside them.
    min_tokens: end-of-sequence and stop ids are masked until so many tokens were generated.

    Raises InvalidRequest naming the field, for values outside the stated range, NaN or a wrong type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, low, high in _FLOAT_RANGES:
            _check_float(name, getattr(self, name), low, high)
        for name, low, high, optional in _INT_RANGES:
            _check_int(name, getattr(self, name), low, high, optional)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}", param=name)
        if self.repetition_penalty <= 0:
            raise InvalidRequest(
                f"repetition_penalty must be above 0, got {self.repetition_penalty}", param="repetition_penalty"
            )
        if self.top_p <= 0:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, got {self.top_p}", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", param="min_tokens"
            )
        object.__setattr__(self, "stop_strings", _stop_strings(self.stop))
        _check_ids(self.stop_token_ids)
        _check_bias(self.logit_bias)
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True", param="stop")

    @property
    def is_greedy(self) -> bool:
        """True when no randomness is used."""
        return self.temperature == 0.0

    @classmethod
    def names(cls) -> frozenset[str]:
        """The field names a caller may pass."""
        return frozenset(f.name for f in fields(cls) if f.init)


_FLOAT_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
_INT_RANGES = (
    ("n", 1, MAX_N, False),
    ("top_k", -1, 2**31 - 1, False),
    ("seed", -(2**63), 2**64 - 1, True),
    ("min_tokens", 0, 2**31 - 1, False),
    ("max_tokens", 1, 2**31 - 1, True),
    ("logprobs", 0, MAX_LOGPROBS, True),
    ("prompt_logprobs", 0, MAX_LOGPROBS, True),
)


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r}", param=name)
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low:g} to {high:g}, got {value}", param=name)


def _check_int(name: str, value: object, low: int, high: int, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {value}", param=name)


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
        raise InvalidRequest(f"stop must be a non-empty string or a list of them, got {stop!r}", param="stop")
    return tuple(strings)


def _check_ids(ids: object) -> None:
    if ids is None:
        return
    if not isinstance(ids, list | tuple) or not all(
        isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids
    ):
        raise InvalidRequest(f"stop_token_ids must be a list of token ids, got {ids!r}", param="stop_token_ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids holds {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
        )


def _check_bias(bias: object) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {bias!r}", param="logit_bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias holds {len(bias)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidRequest(f"logit_bias keys must be token ids, got {token!r}", param="logit_bias")
        _check_float("logit_bias", value, -100.0, 100.0)
