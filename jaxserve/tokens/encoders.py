"""The two `TextEncoder`s: one over the tokenizers library, one over sentencepiece. Knows no file format."""

import re
from collections.abc import Mapping
from typing import final

import sentencepiece
import tokenizers


@final
class LibraryEncoder:
    """Encodes with a `tokenizers.Tokenizer`, which it takes over and never changes again.

    Reading special tokens or not is a setting of the library's object, so there are two objects; they share the model
    (vocabulary and merges), which is nearly all of their memory.
    """

    __slots__ = ("_plain", "_reading")

    def __init__(self, reading: tokenizers.Tokenizer) -> None:
        reading.no_truncation()
        reading.no_padding()
        self._reading = reading
        self._plain = _sharing_model(reading)
        self._plain.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return self._reading.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids


def _sharing_model(original: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A second tokenizer over the same model object; a full copy where added tokens would get other ids."""
    twin = tokenizers.Tokenizer(original.model)
    if original.normalizer is not None:
        twin.normalizer = original.normalizer
    if original.pre_tokenizer is not None:
        twin.pre_tokenizer = original.pre_tokenizer
    added = original.get_added_tokens_decoder()
    twin.add_tokens([added[token] for token in sorted(added)])
    twin.add_special_tokens([added[token] for token in sorted(added) if added[token].special])
    if {token: entry.content for token, entry in twin.get_added_tokens_decoder().items()} == {
        token: entry.content for token, entry in added.items()
    }:
        return twin
    return tokenizers.Tokenizer.from_str(original.to_str())


@final
class SentencePieceEncoder:
    """Encodes with sentencepiece, which knows neither special tokens in text nor tokens added after its training.

    special and added map text to id. Each stretch between such tokens is encoded by itself, with the leading space
    the model was built with: as llama.cpp and the original Llama tokenizer of transformers do.
    """

    __slots__ = ("_added", "_added_pattern", "_ids", "_pattern", "_processor")

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        *,
        special: Mapping[str, int],
        added: Mapping[str, int],
    ) -> None:
        self._processor = processor
        self._added = dict(added)
        self._ids = {**added, **special}
        self._pattern = _any_of(self._ids)
        self._added_pattern = _any_of(self._added)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, self._pattern)

    def encode_plain(self, text: str) -> list[int]:
        return self._encode(text, self._added_pattern)

    def _encode(self, text: str, pattern: re.Pattern[str] | None) -> list[int]:
        parts = pattern.split(text) if pattern else [text]
        ids: list[int] = []
        for n, part in enumerate(parts):
            if n % 2:
                ids.append(self._ids[part])
            elif part:
                ids += self._processor.encode(part, out_type=int)
        return ids


def _any_of(names: Mapping[str, int]) -> re.Pattern[str] | None:
    ordered = sorted((name for name in names if name), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None
