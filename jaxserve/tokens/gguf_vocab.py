"""The vocabulary a GGUF file carries in its metadata, as encoder and token table.

Knows the `tokenizer.ggml.*` keys; checks them before use, since a file may hold anything. Models `gpt2` (byte-level
BPE) and `llama` (sentencepiece BPE) are supported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sentencepiece
import tokenizers
from tokenizers.models import BPE

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from jaxserve.tokens import pre_tokenizers, sentencepiece_model
from jaxserve.tokens.encoders import LibraryEncoder, SentencePieceEncoder
from jaxserve.tokens.token_table import (
    TokenTable,
    byte_level_alphabet,
    byte_level_piece,
    fallback_byte,
    spaced_piece,
)
from jaxserve.tokens.tokenizer import TextEncoder

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
_TOKEN_TYPES = range(1, 7)  # 1 normal, 5 unused


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    """Encoder, table and special tokens of a GGUF file. adds_bos: for files that do not say."""

    encoder: TextEncoder
    table: TokenTable
    special_tokens: dict[str, int]
    adds_bos: bool


def read_vocabulary(metadata: Mapping[str, object]) -> GgufVocabulary:
    """The vocabulary in metadata. Raises UnsupportedCheckpoint or CheckpointError naming the key at fault."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(metadata)
    if model == "llama":
        return _sentencepiece(metadata)
    what = "is missing" if model is None else f"{model!r} is not supported"
    raise UnsupportedCheckpoint(
        f"tokenizer.ggml.model {what} (supported: gpt2, llama); prompts of token ids still work"
    )


def _byte_level(metadata: Mapping[str, object]) -> GgufVocabulary:
    rules = pre_tokenizers.pre_tokenizer_named(metadata.get("tokenizer.ggml.pre"))
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    types = _types(metadata, len(tokens))
    first_id = {token: n for n, token in reversed(list(enumerate(tokens)))}
    merges = [_merge(text) for text in _list(metadata, "tokenizer.ggml.merges", str)]
    try:
        library = tokenizers.Tokenizer(BPE(first_id, merges, ignore_merges=rules.ignore_merges))
    except Exception as error:
        raise CheckpointError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    pre_tokenizers.install(rules, library)
    special = {token: n for token, n in first_id.items() if types[n] == CONTROL and token}
    added = [token for token, n in first_id.items() if types[n] == USER_DEFINED and token]
    library.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    library.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in added])
    alphabet = byte_level_alphabet()
    literal = (UNKNOWN, CONTROL, USER_DEFINED)
    table = TokenTable(
        pieces=tuple(
            token.encode("utf-8", "replace") if kind in literal else byte_level_piece(token, alphabet)
            for token, kind in zip(tokens, types, strict=True)
        ),
        special=_ids_of(types, UNKNOWN, CONTROL),
        byte_ids=frozenset(),
        broken_bytes="sequence",
        strips_first_space=False,
    )
    return GgufVocabulary(encoder=LibraryEncoder(library), table=table, special_tokens=special, adds_bos=rules.adds_bos)


def _sentencepiece(metadata: Mapping[str, object]) -> GgufVocabulary:
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    types = _with_unknown(metadata, _types(metadata, len(tokens)))
    scores = _list(metadata, "tokenizer.ggml.scores", float, len(tokens))
    space_prefix = _flag(metadata, "tokenizer.ggml.add_space_prefix", True)
    if types.count(UNKNOWN) != 1:
        raise CheckpointError(f"tokenizer.ggml.token_type has {types.count(UNKNOWN)} unknown tokens; it must have one")
    has_bytes = len({fallback_byte(t) for t, kind in zip(tokens, types, strict=True) if kind == BYTE} - {None}) == 256
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(
            sentencepiece_model.model_bytes(
                _escaped(tokens, types), scores, types, byte_fallback=has_bytes, space_prefix=space_prefix
            )
        )
    except Exception as error:
        raise CheckpointError(f"tokenizer.ggml.tokens is no sentencepiece vocabulary: {error}") from error
    special = {token: n for n, token in enumerate(tokens) if types[n] in (UNKNOWN, CONTROL)}
    byte_of = {n: fallback_byte(token) for n, token in enumerate(tokens) if types[n] == BYTE}
    pieces = [spaced_piece(token) for token in tokens]
    for n, byte in byte_of.items():
        if byte is not None:
            pieces[n] = bytes([byte])
    table = TokenTable(
        pieces=tuple(pieces),
        special=_ids_of(types, UNKNOWN, CONTROL),
        byte_ids=frozenset(n for n, byte in byte_of.items() if byte is not None),
        broken_bytes="byte",
        strips_first_space=space_prefix,
    )
    encoder = SentencePieceEncoder(processor, special=special, added={})
    return GgufVocabulary(encoder=encoder, table=table, special_tokens=special, adds_bos=True)


def _with_unknown(metadata: Mapping[str, object], types: list[int]) -> list[int]:
    """types with the token named by unknown_token_id marked as unknown, where none is: Gemma files mark it control."""
    named = metadata.get("tokenizer.ggml.unknown_token_id")
    if UNKNOWN in types or type(named) is not int or not 0 <= named < len(types):
        return types
    return [*types[:named], UNKNOWN, *types[named + 1 :]]


def _escaped(tokens: list[str], types: list[int]) -> list[str]:
    """tokens with blanks of user-defined ones as sentencepiece writes them: GGUF files hold these as plain text."""
    return [
        token.replace(" ", "\u2581") if kind == USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    ]


def _ids_of(types: list[int], *kinds: int) -> frozenset[int]:
    return frozenset(n for n, kind in enumerate(types) if kind in kinds)


def _merge(text: str) -> tuple[str, str]:
    left, space, right = text[1:].partition(" ")  # a token may itself begin with a space
    if not text or not space:
        raise CheckpointError(f"tokenizer.ggml.merges has {text!r}, which is not two tokens")
    return text[0] + left, right


def _types(metadata: Mapping[str, object], num_tokens: int) -> list[int]:
    types = _list(metadata, "tokenizer.ggml.token_type", int, num_tokens)
    bad = next((kind for kind in types if kind not in _TOKEN_TYPES), None)
    if bad is not None:
        raise CheckpointError(f"tokenizer.ggml.token_type has {bad}; types are 1 to 6")
    return types


def _list(metadata: Mapping[str, object], key: str, kind: type, length: int | None = None) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values:
        raise CheckpointError(f"{key} is missing or empty; the file holds no usable tokenizer")
    allowed = (int, float) if kind is float else kind
    if not all(isinstance(value, allowed) for value in values):
        raise CheckpointError(f"{key} must hold {kind.__name__} values only")
    if length is not None and len(values) != length:
        raise CheckpointError(f"{key} has {len(values):,} entries for {length:,} tokens")
    return values


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} must be true or false, got {value!r}")
    return value
