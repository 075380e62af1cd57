"""`Tokenizer`: text to ids, ids to text, and the facts a request needs. Knows no file format; see load.py."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, final, runtime_checkable

from jaxserve.errors import InvalidRequest
from jaxserve.tokens.special_text import SpecialText
from jaxserve.tokens.token_table import TokenTable


@runtime_checkable
class TextEncoder(Protocol):
    """Text to ids without any BOS; implementations are safe to call from several threads."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text; the strings of special tokens become those tokens."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of the text; the strings of special tokens are ordinary text."""
        ...


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokenizer:
    """The tokenizer of one model; immutable and safe to share between threads.

    table: bytes of every id. bos_token_id: None when the model has none. adds_bos: prompts begin with it.
    eos_token_ids: every id that ends a generation. special_tokens: text to id of the control tokens; other added tokens
    (runs of blanks, `<think>` of some models) are ordinary vocabulary and not in it. bos_token and eos_token are the
    texts a chat template sees, empty when there is none. chat_template: Jinja source, None when the files carry none.
    """

    encoder: TextEncoder = field(repr=False)
    table: TokenTable = field(repr=False)
    special_tokens: Mapping[str, int] = field(repr=False)
    bos_token_id: int | None
    adds_bos: bool
    eos_token_ids: frozenset[int]
    bos_token: str
    eos_token: str
    chat_template: str | None = field(repr=False)
    special_text: SpecialText = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "special_tokens", MappingProxyType(dict(self.special_tokens)))
        object.__setattr__(self, "special_text", SpecialText(self.special_tokens))

    @property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: a text has at least len(bytes) / max_token_bytes tokens."""
        return self.table.max_piece_bytes

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token."""
        return len(self.table.pieces)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of text, special-token strings included as tokens.

        add_special puts one BOS in front when the model wants it and the text does not already begin with it. An EOS is
        never appended. Raises InvalidRequest for text that is not valid Unicode (a lone surrogate).
        """
        _check_unicode(text)
        ids = self.encoder.encode(text)
        return self.with_bos(ids) if add_special else ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which special-token strings are ordinary text; no BOS."""
        _check_unicode(text)
        return self.encoder.encode_plain(text)

    def with_bos(self, ids: list[int]) -> list[int]:
        """ids with exactly one leading BOS if the model wants one, else ids."""
        if self.bos_token_id is None or not self.adds_bos or ids[:1] == [self.bos_token_id]:
            return ids
        return [self.bos_token_id, *ids]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 show as U+FFFD. Raises InvalidRequest for an id without a token."""
        self._check_ids(ids)
        return self.table.decode(ids, skip_special)

    def token_text(self, token: int) -> str:
        """Text of a single token as logprobs show it: special tokens by name, partial characters as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of a single token, for the `bytes` field of OpenAI logprobs."""
        self._check_ids((token,))
        return self.table.pieces[token]

    def _check_ids(self, ids: Iterable[int]) -> None:
        size = self.vocab_size
        bad = next((i for i in ids if not 0 <= i < size), None)
        if bad is not None:
            raise InvalidRequest(f"token id {bad} is outside this model's vocabulary (0 to {size - 1})")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; send valid Unicode"
        ) from None
