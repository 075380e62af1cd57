"""The text of one choice as it grows: detokenized, held back while a stop string may be coming, cut at stops."""

from jaxserve.engine.requests import EngineEvent, TopTokens
from jaxserve.outputs import Logprob, TextDelta
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokens import Detokenizer, StopStrings, Tokenizer


class ChoiceText:
    """Turns the engine's events of one choice into deltas. Without a tokenizer the text stays empty."""

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer | None, prompt_token_ids: list[int]
    ) -> None:
        self.index = index
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special=params.skip_special_tokens)
        self._num_tokens = 0
        self._stops = None
        if params.stop_strings:
            self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)

    def delta(self, event: EngineEvent) -> TextDelta:
        """What the event adds. finish_reason "stop" with a string as stop_reason: the engine still has to be told."""
        text, matched = self._text(event)
        finish_reason, stop_reason = event.finish_reason, event.stop_reason
        if matched is not None:
            finish_reason, stop_reason = "stop", matched
        return TextDelta(
            index=self.index,
            text=text,
            token_ids=event.token_ids,
            logprobs=self._logprobs(event.logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _text(self, event: EngineEvent) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        ends_by_token = event.finish_reason == "stop" and not self._params.include_stop_str_in_output
        text = self._detokenizer.push(event.token_ids[:-1] if ends_by_token else event.token_ids)
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        if self._stops is None:
            return text, None
        self._num_tokens += len(event.token_ids)
        if self._num_tokens <= self._params.min_tokens and event.finish_reason is None:
            return text, None  # stop strings count from min_tokens on, as in vLLM
        emit, matched = self._stops.push(text)
        if matched is None and event.finish_reason is not None:
            emit += self._stops.flush()
        return emit, matched

    def _logprobs(self, found: tuple[TopTokens, ...] | None) -> tuple[dict[int, Logprob], ...] | None:
        if found is None:
            return None
        return tuple(logprob_entry(top, self._tokenizer) for top in found)


def logprob_entry(top: TopTokens, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The chosen token first, then the alternatives by rank, in vLLM's shape."""

    def text(token_id: int) -> str | None:
        if tokenizer is None or token_id >= tokenizer.vocab_size:  # padding rows of an embedding have no text
            return None
        return tokenizer.token_text(token_id)

    entry = {top.token_id: Logprob(top.logprob, top.rank, text(top.token_id))}
    for rank, (token_id, logprob) in enumerate(zip(top.top_ids, top.top_logprobs, strict=True), start=1):
        if token_id >= 0 and token_id not in entry:
            entry[token_id] = Logprob(logprob, rank, text(token_id))
    return entry
