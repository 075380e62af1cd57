"""`Detokenizer`: generated ids to text, token by token, never showing half a character.

Bytes go through a UTF-8 decoder that keeps an unfinished character back, so a token costs the same at any length of
the output. Nothing is decoded twice.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol, final, runtime_checkable

from jaxserve.tokens.token_table import REPLACEMENT, TokenTable
from jaxserve.tokens.tokenizer import Tokenizer


@runtime_checkable
class _Assembler(Protocol):
    """Ids to text with memory for the unfinished character."""

    def push(self, ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...

    def start_after(self, prompt: Sequence[int]) -> int:
        """Takes up the unfinished character at the end of prompt; gives the number of U+FFFD that it would show."""
        ...


@final
class Detokenizer:
    """Text of one generated sequence as it grows.

    The concatenation of all `push` results and of `flush` is `tokenizer.decode` of all pushed ids, as they read after
    the prompt: no leading space is taken away there, and a character begun in the prompt is completed. One exception:
    vocabularies with `<0x..>` tokens whose library blanks a whole broken run of them; characters of such a run that
    were complete before it broke are already out.

    Ids beyond the vocabulary (padding rows of an embedding) have no text and give none.
    """

    __slots__ = ("_assembler", "_at_start", "_prompt_marks")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special: bool = True) -> None:
        table = tokenizer.table
        pieces = table.shown if skip_special else table.pieces
        self._assembler = _assembler(table, pieces)
        self._prompt_marks = self._assembler.start_after(prompt_token_ids)
        self._at_start = table.strips_first_space and not any(_piece(pieces, i) for i in prompt_token_ids)

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these ids; empty while a character is unfinished."""
        text = self._assembler.push(ids)
        return self._settle(text) if self._at_start or self._prompt_marks else text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished, else nothing."""
        return self._settle(self._assembler.finish())

    def _settle(self, text: str) -> str:
        """Takes away the first space of a text without prompt, and broken bytes that belong to the prompt."""
        if not text:
            return text
        while self._prompt_marks and text.startswith(REPLACEMENT):
            self._prompt_marks -= 1
            text = text[1:]
        self._prompt_marks = self._prompt_marks if not text else 0
        if self._at_start and text:
            self._at_start = False
            return text[1:] if text.startswith(" ") else text
        return text


def _assembler(table: TokenTable, pieces: tuple[bytes, ...]) -> _Assembler:
    if table.broken_bytes == "sequence":
        return _ByteStream(pieces)
    return _ByteRuns(pieces, table.byte_ids, blanks_run=table.broken_bytes == "run")


def _piece(pieces: tuple[bytes, ...], token: int) -> bytes:
    return pieces[token] if 0 <= token < len(pieces) else b""


class _ByteStream:
    """Byte-level BPE: every token is bytes of one stream."""

    __slots__ = ("_decoder", "_pieces")

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        pieces = self._pieces
        return self._decoder.decode(b"".join([_piece(pieces, i) for i in ids]))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)

    def start_after(self, prompt: Sequence[int]) -> int:
        tail = b""
        for token in reversed(prompt):
            tail = _piece(self._pieces, token) + tail
            if len(tail) >= 3:  # a character has at most 4 bytes, so at most 3 are unfinished
                break
        self._decoder.decode(tail)
        return 1 if self._decoder.getstate()[0] else 0


class _ByteRuns:
    """Sentencepiece style: whole-text tokens, and runs of tokens that stand for one byte each."""

    __slots__ = ("_blanking", "_blanks_run", "_byte_ids", "_pending", "_pieces")

    def __init__(self, pieces: tuple[bytes, ...], byte_ids: frozenset[int], *, blanks_run: bool) -> None:
        self._pieces, self._byte_ids, self._blanks_run = pieces, byte_ids, blanks_run
        self._pending = b""
        self._blanking = False

    def push(self, ids: Iterable[int]) -> str:
        out = []
        for token in ids:
            piece = _piece(self._pieces, token)
            if not piece:
                continue
            if token in self._byte_ids:
                out.append(self._push_byte(piece))
                continue
            if self._pending or self._blanking:
                out.append(self.finish())
            out.append(piece.decode("utf-8", "replace"))
        return "".join(out)

    def finish(self) -> str:
        text = REPLACEMENT * len(self._pending)
        self._pending = b""
        self._blanking = False
        return text

    def start_after(self, prompt: Sequence[int]) -> int:
        run: list[int] = []
        for token in reversed(prompt):
            if _piece(self._pieces, token) and token not in self._byte_ids:
                break
            run.append(token)
        self.push(reversed(run))
        return len(self._pending)

    def _push_byte(self, byte: bytes) -> str:
        if self._blanking:
            return REPLACEMENT
        self._pending += byte
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            return "" if error.reason == "unexpected end of data" else self._break(error.end)
        self._pending = b""
        return text

    def _break(self, end: int) -> str:
        """The pending bytes turned out to be no character: shows those up to end, or all of them, as broken."""
        if self._blanks_run:
            text = self.finish()
            self._blanking = True
            return text
        rest, self._pending = self._pending[end:], b""
        return REPLACEMENT * end + "".join(self._push_byte(rest[n : n + 1]) for n in range(len(rest)))
