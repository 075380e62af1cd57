"""Builds a `Tokenizer` from what a model ships: the metadata of a GGUF file, or the files of an HF folder."""

from collections.abc import Mapping
from pathlib import Path

from checkpoints.errors import CheckpointError
from jaxserve.tokens import gguf_vocab, hf_folder
from jaxserve.tokens.tokenizer import Tokenizer

_EOS_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def load_tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of a GGUF file, from its metadata (key to plain Python value).

    Ids of end-of-text, end-of-turn and end-of-message all end a generation. Raises UnsupportedCheckpoint for a kind of
    tokenizer that this version cannot reproduce, CheckpointError for metadata that make no sense.
    """
    vocabulary = gguf_vocab.read_vocabulary(metadata)
    names = vocabulary.table.pieces
    bos = _token_id(metadata, "tokenizer.ggml.bos_token_id", len(names))
    ends = [_token_id(metadata, key, len(names)) for key in _EOS_KEYS]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", vocabulary.adds_bos)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"tokenizer.chat_template must be a string, got {type(template).__name__}")
    return Tokenizer(
        encoder=vocabulary.encoder,
        table=vocabulary.table,
        special_tokens=vocabulary.special_tokens,
        bos_token_id=bos,
        adds_bos=bool(adds_bos),
        eos_token_ids=frozenset(end for end in ends if end is not None),
        bos_token=_name(names, bos),
        eos_token=_name(names, ends[0]),
        chat_template=template,
    )


def holds_tokenizer(folder: Path) -> bool:
    """Whether an HF model folder has a vocabulary."""
    return hf_folder.holds_tokenizer(folder)


def load_tokenizer_from_folder(path: Path, *, reads_generation_config: bool = True) -> Tokenizer:
    """The tokenizer of an HF model folder: tokenizer.json, else tokenizer.model, with their configuration files.

    reads_generation_config: whether the ids it lists end a generation, or else those of config.json. Raises
    UnsupportedCheckpoint when the folder has neither tokenizer, CheckpointError for damaged files.
    """
    return hf_folder.read_folder(path, reads_generation_config=reads_generation_config)


def _token_id(metadata: Mapping[str, object], key: str, vocab_size: int) -> int | None:
    token = metadata.get(key)
    if token is None:
        return None
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise CheckpointError(f"{key} is {token!r}; token ids go from 0 to {vocab_size - 1}")
    return token


def _name(pieces: tuple[bytes, ...], token: int | None) -> str:
    return "" if token is None else pieces[token].decode("utf-8", "replace")
