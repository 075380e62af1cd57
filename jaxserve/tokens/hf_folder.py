"""Reads the tokenizer files of an HF model folder. Knows which file says what, and which wins.

tokenizer.json          vocabulary and rules (tokenizers library), else
tokenizer.model         vocabulary (sentencepiece or tiktoken), with added tokens from tokenizer_config.json
qwen.tiktoken etc.      vocabulary (tiktoken), the same
tokenizer_config.json   bos and eos, add_bos_token, chat template
chat_template.jinja     wins over chat_template.json, which wins over tokenizer_config.json
generation_config.json  further ids that end a generation (config.json where it is absent or left out)
"""

import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.generation_config import listed_eos_ids
from jaxserve.tokens import tiktoken_vocab
from jaxserve.tokens.encoders import LibraryEncoder, SentencePieceEncoder
from jaxserve.tokens.library_table import added_special_ids, library_table
from jaxserve.tokens.token_table import TokenTable, fallback_byte, spaced_piece
from jaxserve.tokens.tokenizer import TextEncoder, Tokenizer


def holds_tokenizer(folder: Path) -> bool:
    """Whether there is a vocabulary that `read_folder` reads."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", *tiktoken_vocab.FILE_NAMES))


def read_folder(folder: Path, *, reads_generation_config: bool = True) -> Tokenizer:
    """The tokenizer of folder. Raises UnsupportedCheckpoint or CheckpointError naming the file at fault."""
    ends_file = folder / "generation_config.json"
    ends_file = ends_file if reads_generation_config and ends_file.is_file() else folder / "config.json"
    config = _json_object(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        encoder, table, special, adds_bos = _from_library(folder / "tokenizer.json")
    elif (path := _tiktoken_file(folder)) is not None:
        encoder, table, special, adds_bos = _from_tiktoken(path, config)
    elif (folder / "tokenizer.model").is_file():
        encoder, table, special, adds_bos = _from_sentencepiece(folder / "tokenizer.model", config)
    else:
        raise UnsupportedCheckpoint(
            f"{folder} has neither tokenizer.json nor tokenizer.model, so it cannot read or write text; "
            "prompts given as token ids still work"
        )
    names = {piece: n for n, piece in reversed(list(enumerate(table.pieces)))} | {
        name.encode(): n for name, n in special.items()
    }
    bos_token, eos_token = (_token_name(folder, config, key) for key in ("bos_token", "eos_token"))
    says_bos = config.get("add_bos_token")
    return Tokenizer(
        encoder=encoder,
        table=table,
        special_tokens=special,
        bos_token_id=_id_named(names, bos_token, "bos_token"),
        adds_bos=says_bos if isinstance(says_bos, bool) else adds_bos,
        eos_token_ids=_eos_ids(ends_file, _id_named(names, eos_token, "eos_token")),
        bos_token=bos_token,
        eos_token=eos_token,
        chat_template=_chat_template(folder, config),
    )


def _from_library(path: Path) -> tuple[TextEncoder, TokenTable, dict[str, int], bool]:
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read by the tokenizers library: {error}") from error
    special = added_special_ids(library)
    table = library_table(library, path)
    wrapped = library.encode("", add_special_tokens=True).ids
    adds_bos = bool(wrapped) and wrapped[0] in special.values()
    return LibraryEncoder(library), table, special, adds_bos


def _tiktoken_file(folder: Path) -> Path | None:
    for name in (*tiktoken_vocab.FILE_NAMES, "tokenizer.model"):
        if (folder / name).is_file() and (name != "tokenizer.model" or tiktoken_vocab.is_tiktoken(folder / name)):
            return folder / name
    return None


def _from_tiktoken(path: Path, config: dict[str, Any]) -> tuple[TextEncoder, TokenTable, dict[str, int], bool]:
    entries = _added_tokens(config, path.parent)
    added = {token: entry["content"] for token, entry in entries.items()}
    special = {entry["content"]: token for token, entry in entries.items() if entry.get("special")}
    cut = tiktoken_vocab.cut_of(_json_object(path.parent / "config.json").get("model_type"), path)
    encoder, table = tiktoken_vocab.read_vocabulary(path, cut, added, special)
    return encoder, table, special, cut.adds_bos and bool(config.get("bos_token"))


def _from_sentencepiece(path: Path, config: dict[str, Any]) -> tuple[TextEncoder, TokenTable, dict[str, int], bool]:
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(path.read_bytes())
    except Exception as error:
        raise CheckpointError(f"{path} is no sentencepiece model: {error}") from error
    num_pieces = model.get_piece_size()
    texts = [model.id_to_piece(n) for n in range(num_pieces)]
    special = {texts[n]: n for n in range(num_pieces) if model.is_control(n) or model.is_unknown(n)}
    byte_ids = frozenset(n for n in range(num_pieces) if model.is_byte(n))
    pieces = {n: _piece(text, n in byte_ids) for n, text in enumerate(texts)}
    added: dict[str, int] = {}
    for token, entry in _added_tokens(config, path.parent).items():
        pieces[token] = entry["content"].encode("utf-8", "replace")
        (special if entry.get("special") else added)[entry["content"]] = token
    table = TokenTable(
        pieces=tuple(pieces.get(n, b"") for n in range(max(pieces) + 1)),
        special=frozenset(special.values()),
        byte_ids=byte_ids,
        broken_bytes="byte",
        strips_first_space=model.encode("a", out_type=str)[0].startswith("\u2581"),
    )
    return SentencePieceEncoder(model, special=special, added=added), table, special, True


def _piece(text: str, is_byte: bool) -> bytes:
    byte = fallback_byte(text) if is_byte else None
    return spaced_piece(text) if byte is None else bytes([byte])


def _added_tokens(config: dict[str, Any], folder: Path) -> dict[int, dict[str, Any]]:
    """Tokens that were added after training, by id, from `added_tokens_decoder`."""
    entries = config.get("added_tokens_decoder", {})
    path = folder / "tokenizer_config.json"
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder must be an object")
    added = {}
    for key, entry in entries.items():
        sound = key.isdecimal() and len(key) < 9 and isinstance(entry, dict) and isinstance(entry.get("content"), str)
        if not sound:
            raise CheckpointError(f"{path}: added_tokens_decoder has a damaged entry {key!r}")
        added[int(key)] = entry
    return added


def _token_name(folder: Path, config: dict[str, Any], key: str) -> str:
    """Text of bos_token or eos_token, empty when the model has none."""
    value = config[key] if key in config else _json_object(folder / "special_tokens_map.json").get(key)
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {key} must be a string, got {value!r}")
    return content or ""


def _id_named(names: dict[bytes, int], token: str, key: str) -> int | None:
    if not token:
        return None
    if token.encode("utf-8", "replace") not in names:
        raise CheckpointError(f"tokenizer_config.json: {key} {token!r} is not in the vocabulary")
    return names[token.encode("utf-8", "replace")]


def _eos_ids(source: Path, eos: int | None) -> frozenset[int]:
    """The eos token's id and those that the file lists."""
    return listed_eos_ids(_json_object(source), source) | (frozenset() if eos is None else frozenset({eos}))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return _read_text(jinja)
    template = _json_object(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if template is None or isinstance(template, str):
        return template
    named = _named_templates(template)
    if named is None:
        raise CheckpointError(f"{folder}: chat_template must be a string or a list of named templates")
    if "default" not in named and len(named) > 1:
        raise UnsupportedCheckpoint(
            f"{folder}: chat_template has no template named 'default' among {', '.join(sorted(named))}; "
            "put the one to use into chat_template.jinja"
        )
    return named.get("default", next(iter(named.values()), None))


def _named_templates(value: object) -> dict[str, str] | None:
    """name to source of `[{"name": ..., "template": ...}]`, None for any other shape."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        return None
    named = {entry.get("name"): entry.get("template") for entry in value}
    sound = all(isinstance(text, str) for pair in named.items() for text in pair)
    return {str(name): str(source) for name, source in named.items()} if sound else None


def _json_object(path: Path) -> dict[str, Any]:
    """The JSON object in path, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error
