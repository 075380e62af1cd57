"""Reads a vocabulary in tiktoken's format: a line for each token, its bytes in base64 and its rank, which is its id.

The file has neither special tokens nor the cut before byte-pair encoding: the first stand in tokenizer_config.json, the
second is known for the families below and nowhere guessed. Format: the tiktoken repository (tiktoken/load.py).
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers.models import BPE

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from jaxserve.tokens import pre_tokenizers
from jaxserve.tokens.encoders import LibraryEncoder
from jaxserve.tokens.pre_tokenizers import PreTokenizer
from jaxserve.tokens.token_table import TokenTable, byte_level_alphabet

FILE_NAMES = ("tiktoken.model", "qwen.tiktoken", "tokenizer.tiktoken")
MAX_BYTES, MAX_TOKEN_BYTES = 32 << 20, 1024
# The cut of a family, by the model_type of config.json, under the name that GGUF gives it.
_CUTS = {"llama": "llama-bpe", "qwen": "qwen2", "qwen2": "qwen2", "qwen3": "qwen2", "gpt_oss": "gpt-4o"}


def is_tiktoken(path: Path) -> bool:
    """Whether the file's first line is one of this format (Llama 3 calls such a file tokenizer.model)."""
    with path.open("rb") as file:
        return _token(file.readline(2 * MAX_TOKEN_BYTES)) is not None


def cut_of(model_type: object, path: Path) -> PreTokenizer:
    """The family's cut. Raises UnsupportedCheckpoint for a family whose cut is not known."""
    if isinstance(model_type, str) and model_type in _CUTS:
        return pre_tokenizers.pre_tokenizer_named(_CUTS[model_type])
    known = ", ".join(sorted(_CUTS))
    raise UnsupportedCheckpoint(
        f"{path}: a tiktoken vocabulary does not say how text is cut, and for model_type {model_type!r} "
        f"it is not known (known: {known}); add the model's tokenizer.json"
    )


def read_vocabulary(
    path: Path, cut: PreTokenizer, added: Mapping[int, str], special: Mapping[str, int]
) -> tuple[LibraryEncoder, TokenTable]:
    """The vocabulary in path, with added tokens by id, the special ones among them. Raises CheckpointError."""
    ranks = _ranks(path)
    clash = sorted(set(added) & set(ranks.values()))
    if clash:
        raise CheckpointError(f"{path}: token {clash[0]} is also the added token {added[clash[0]]!r}")
    alphabet = {byte: char for char, byte in byte_level_alphabet().items()}
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()} | {text: n for n, text in added.items()}
    merges = [(spelled[left], spelled[right]) for left, right in _merges(ranks)]
    library = tokenizers.Tokenizer(BPE(vocabulary, merges, ignore_merges=cut.ignore_merges))
    pre_tokenizers.install(cut, library)
    ordinary = [text for text in added.values() if text not in special]
    library.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    library.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in ordinary])
    pieces = {rank: token for token, rank in ranks.items()} | {n: text.encode() for n, text in added.items()}
    table = TokenTable(
        pieces=tuple(pieces.get(n, b"") for n in range(max(pieces) + 1)),
        special=frozenset(special.values()),
        byte_ids=frozenset(),
        broken_bytes="sequence",
        strips_first_space=False,
    )
    return LibraryEncoder(library), table


def _ranks(path: Path) -> dict[bytes, int]:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise CheckpointError(f"{path}: {size:,} bytes are no sound vocabulary (at most {MAX_BYTES:,})")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        found = _token(line)
        if found is None:
            raise CheckpointError(f"{path}: line {number} is not a token in base64 and its rank: {line[:60]!r}")
        ranks[found[0]] = found[1]
    if len(set(ranks.values())) != len(ranks) or max(ranks.values()) >= 2 * len(ranks) + 1024:
        raise CheckpointError(f"{path}: the ranks of {len(ranks):,} tokens are not their ids")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} single bytes have no token, first {missing[0]:#x}")
    return ranks


def _token(line: bytes) -> tuple[bytes, int] | None:
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit() or len(fields[1]) > 9:
        return None
    try:
        token = base64.b64decode(fields[0], validate=True)
    except (binascii.Error, ValueError):
        return None
    return (token, int(fields[1])) if 0 < len(token) <= MAX_TOKEN_BYTES else None


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, in the order of what it makes: tiktoken merges by that rank alone."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
    return merges
