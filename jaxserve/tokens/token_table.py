"""The bytes behind every token id, and how bytes become text. Knows no library and no file format.

Tokenizers disagree on one thing only: what a sequence of bytes that is not UTF-8 looks like. `BrokenBytes` names the
three answers in use, so that decoded text equals what the model's original tokenizer gives.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

REPLACEMENT = "\ufffd"

BrokenBytes = Literal["sequence", "byte", "run"]
"""U+FFFD once per broken sequence (byte-level BPE), once per broken byte (sentencepiece), or once for every byte of a
run of byte tokens that is not UTF-8 as a whole (the `ByteFallback` decoder of the tokenizers library)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """Bytes, kind and decoding rules of a vocabulary.

    pieces[i] are the bytes of token i, empty for an id without a token. special: ids left out of text by default.
    byte_ids: tokens that stand for one raw byte (empty for byte-level BPE, where every token is raw bytes).
    strips_first_space: the tokenizer puts a space before the text, so decoding takes one away.
    """

    pieces: tuple[bytes, ...] = field(repr=False)
    special: frozenset[int] = field(repr=False)
    byte_ids: frozenset[int] = field(repr=False)
    broken_bytes: BrokenBytes
    strips_first_space: bool
    shown: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    max_piece_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shown = list(self.pieces)
        for token in self.special:
            shown[token] = b""
        object.__setattr__(self, "shown", tuple(shown))
        object.__setattr__(self, "max_piece_bytes", max(map(len, self.pieces), default=1) or 1)

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        """The text of ids, all of which must be in the table."""
        pieces = self.shown if skip_special else self.pieces
        if self.broken_bytes == "sequence":
            text = b"".join([pieces[i] for i in ids]).decode("utf-8", "replace")
        else:
            text = self._decode_runs([i for i in ids if pieces[i]], pieces)
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def _decode_runs(self, ids: list[int], pieces: tuple[bytes, ...]) -> str:
        try:
            return b"".join([pieces[i] for i in ids]).decode()
        except UnicodeDecodeError:  # some run of byte tokens is broken; the rules differ per run
            runs = groupby(ids, key=self.byte_ids.__contains__)
            return "".join(self._decode_run(b"".join([pieces[i] for i in run])) for _, run in runs)

    def _decode_run(self, run: bytes) -> str:
        text = ""
        while run:
            try:
                return text + run.decode()
            except UnicodeDecodeError as error:
                if self.broken_bytes == "run":
                    return REPLACEMENT * len(run)
                text += run[: error.start].decode() + REPLACEMENT * (error.end - error.start)
                run = run[error.end :]
        return text


def byte_level_alphabet() -> dict[str, int]:
    """Character to byte, as byte-level BPE vocabularies spell bytes.

    Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 on, in order (GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(hidden)})
    return alphabet


def byte_level_piece(token: str, alphabet: dict[str, int]) -> bytes:
    """The bytes a byte-level token spells; a token with any other character spells its own UTF-8."""
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def fallback_byte(token: str) -> int | None:
    """The byte that a token such as `<0x0A>` stands for, None for every other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def spaced_piece(token: str) -> bytes:
    """The bytes of a sentencepiece token, in which U+2581 stands for a space."""
    return token.replace("\u2581", " ").encode("utf-8", "replace")
