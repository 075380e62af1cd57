"""The token table of a `tokenizers.Tokenizer`, from its vocabulary and the decoder it declares.

Decoders are small programs; these are recognized: ByteLevel (GPT-2, Llama 3, Qwen), and replacement of U+2581 with
byte fallback, with or without the removal of one leading space (Llama 2, Mistral, Gemma). Any other is refused.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from jaxserve.tokens.token_table import (
    TokenTable,
    byte_level_alphabet,
    byte_level_piece,
    fallback_byte,
    spaced_piece,
)

MAX_TOKENS = 4_000_000  # ids beyond this are a damaged file; the largest vocabularies have some 260,000
_REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def added_special_ids(library: tokenizers.Tokenizer) -> dict[str, int]:
    """Text to id of the added tokens that are marked special."""
    return {entry.content: n for n, entry in library.get_added_tokens_decoder().items() if entry.special}


def library_table(library: tokenizers.Tokenizer, path: Path) -> TokenTable:
    """Bytes and decoding rules of library; path is named in errors. Raises UnsupportedCheckpoint, CheckpointError."""
    texts = {n: text for text, n in library.get_vocab(with_added_tokens=True).items()}
    texts.update({n: entry.content for n, entry in library.get_added_tokens_decoder().items()})
    if not texts or max(texts) >= MAX_TOKENS:
        raise CheckpointError(f"{path}: the vocabulary is empty or its ids exceed {MAX_TOKENS:,}")
    tokens = [texts.get(n, "") for n in range(max(texts) + 1)]
    special = frozenset(added_special_ids(library).values())
    steps = _decoder_steps(library)
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        alphabet = byte_level_alphabet()
        return TokenTable(
            pieces=tuple(byte_level_piece(token, alphabet) for token in tokens),
            special=special,
            byte_ids=frozenset(),
            broken_bytes="sequence",
            strips_first_space=False,
        )
    strips = _strips_first_space(steps)
    if strips is None:
        kinds = ", ".join(str(step.get("type")) for step in steps) or "none"
        raise UnsupportedCheckpoint(
            f"{path}: decoder ({kinds}) is not supported (supported: ByteLevel, or Replace with ByteFallback); "
            "prompts given as token ids still work"
        )
    byte_of = {n: byte for n, token in enumerate(tokens) if (byte := fallback_byte(token)) is not None}
    return TokenTable(
        pieces=tuple(bytes([byte_of[n]]) if n in byte_of else spaced_piece(t) for n, t in enumerate(tokens)),
        special=special,
        byte_ids=frozenset(byte_of),
        broken_bytes="run",
        strips_first_space=strips,
    )


def _decoder_steps(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if library.decoder is None:
        return []
    decoder = json.loads(library.decoder.__getstate__())
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _strips_first_space(steps: list[dict[str, Any]]) -> bool | None:
    """Whether a byte-fallback decoder takes away the first space; None for a decoder of another kind."""
    if steps[:1] != [_REPLACE]:
        return None
    rest = [step for step in steps[1:] if step.get("type") != "Fuse"]
    kinds = [step.get("type") for step in rest]
    if kinds == ["ByteFallback"]:
        return False
    return True if kinds == ["ByteFallback", "Strip"] and rest[1] == _STRIP else None
