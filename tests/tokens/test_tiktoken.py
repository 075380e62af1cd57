"""Vocabularies in tiktoken's format: the same ids as the same tokenizer in another container, and clear refusals."""

import base64
import json
import os
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from jaxserve.tokens import load_tokenizer_from_folder
from jaxserve.tokens.pre_tokenizers import pre_tokenizer_named
from jaxserve.tokens.tiktoken_vocab import read_vocabulary

TEXTS = [
    "Hello, world!  Two spaces and 12345 digits.",
    "def f(x):\n\treturn x**2  # größer 日本語 🙂\n\n",
    "",
    "I'll say it's 10:30 <|im_start|>user",
]
BYTES = [bytes([byte]) for byte in range(256)]


def lines(tokens: list[bytes], first: int = 0) -> bytes:
    return b"\n".join(base64.b64encode(token) + b" %d" % n for n, token in enumerate(tokens, start=first))


def folder_with(tmp_path: Path, content: bytes, model_type: str = "llama", name: str = "tokenizer.model") -> Path:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    added = {"300": {"content": "<|begin_of_text|>", "special": True}, "301": {"content": "<note>"}}
    config = {"added_tokens_decoder": added, "bos_token": "<|begin_of_text|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_ids_of_a_real_vocabulary(smollm2_tokenizer, tmp_path):
    """SmolLM2's tokens in the order of their ids, which is that of its merges; it has no token for 21 bytes."""
    table = smollm2_tokenizer.table
    special = {table.pieces[n].decode(): n for n in table.special}
    kept = {n: piece for n, piece in enumerate(table.pieces) if n not in table.special}
    kept |= dict(enumerate(set(BYTES) - set(kept.values()), start=len(table.pieces)))
    path = tmp_path / "vocab.tiktoken"
    path.write_bytes(b"\n".join(base64.b64encode(piece) + b" %d" % n for n, piece in kept.items()))
    added = {n: text for text, n in special.items()}
    encoder, again = read_vocabulary(path, pre_tokenizer_named("smollm"), added, special)
    for text in TEXTS:
        ids = encoder.encode(text)
        assert ids == smollm2_tokenizer.encoder.encode(text)
        assert again.decode(ids, False) == text


@pytest.mark.slow
@pytest.mark.skipif("JAXSERVE_NPM_TOKENIZERS" not in os.environ, reason="JAXSERVE_NPM_TOKENIZERS names no folder")
@pytest.mark.parametrize(("name", "model_type"), [("llama3", "llama"), ("qwen3", "qwen3")])
def test_ids_of_other_families(name, model_type, tmp_path):
    original = load_tokenizer_from_folder(Path(os.environ["JAXSERVE_NPM_TOKENIZERS"]) / name / "models")
    pieces, special = original.table.pieces, original.special_tokens
    ordinary = {n: piece for n, piece in enumerate(pieces) if piece and n not in special.values() and n < 151_643}
    content = b"\n".join(base64.b64encode(piece) + b" %d" % n for n, piece in ordinary.items())
    (tmp_path / "tiktoken.model").write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    added = {str(n): {"content": text, "special": True} for text, n in special.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    again = load_tokenizer_from_folder(tmp_path)
    for text in TEXTS:
        assert again.encoder.encode(text) == original.encoder.encode(text)


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken"])
def test_added_tokens_and_bos_come_from_the_configuration(tmp_path, name):
    folder = folder_with(tmp_path, lines([*BYTES, b"he", b"hel", b"lo"]), name=name)
    tokenizer = load_tokenizer_from_folder(folder)
    assert tokenizer.encode("hello") == [300, 257, 258]
    assert tokenizer.encoder.encode("<note>hel") == [301, 257]
    assert tokenizer.table.decode([300, 257, 258], True) == "hello"
    assert (tokenizer.bos_token_id, tokenizer.adds_bos) == (300, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(BYTES[1:]), "1 single bytes have no token, first 0x0"),
        (lines(BYTES) + b"\n!!! 7", "line 257 is not a token in base64 and its rank: b'!!! 7'"),
        (lines(BYTES) + b"\naGU= 3", "the ranks of 257 tokens are not their ids"),
        (lines([*BYTES, *(b"a" * n for n in range(2, 60))]), "token 300 is also the added token '<|begin_of_text|>'"),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, content, message):
    with pytest.raises(CheckpointError) as error:
        load_tokenizer_from_folder(folder_with(tmp_path, content))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_family_whose_cut_is_not_known_is_refused(tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match=r"for model_type 'mpt' it is not known \(known: .*tokenizer.json"):
        load_tokenizer_from_folder(folder_with(tmp_path, lines(BYTES), model_type="mpt"))
