"""Tokenizers small enough to be built in a test: byte-level BPE in GGUF metadata, and a trained sentencepiece model."""

import io
from pathlib import Path

import pytest
import sentencepiece

from checkpoints.gguf import open_gguf
from jaxserve.tokens import Tokenizer, load_tokenizer_from_gguf
from jaxserve.tokens.token_table import byte_level_alphabet

SENTENCES = ["the quick brown fox jumps over the lazy dog", "a cat sat on the mat", "über den Dächern"] * 20


def byte_level_metadata(**changes: object) -> dict[str, object]:
    """All 256 bytes, two merges, four control tokens; changes replace or add keys under tokenizer.ggml."""
    words = ["he", "hel"]
    controls = ["<s>", "<|im_start|>", "<|im_end|>", "<|eot|>"]
    tokens = [*sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__), *words, *controls]
    metadata: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 258 + [3] * 4,
        "merges": ["h e", "he l"],
        "bos_token_id": 258,
        "eos_token_id": 260,
        "eot_token_id": 261,
        "add_bos_token": True,
    }
    metadata.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return load_tokenizer_from_gguf(byte_level_metadata())


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer_from_gguf(open_gguf(smollm2_path).metadata)


@pytest.fixture(scope="session")
def sentencepiece_model() -> bytes:
    """A BPE model with byte fallback and one user-defined symbol, normalization off, as Llama's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        user_defined_symbols=["<think>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def processor(sentencepiece_model: bytes) -> sentencepiece.SentencePieceProcessor:
    loaded = sentencepiece.SentencePieceProcessor()
    loaded.LoadFromSerializedProto(sentencepiece_model)
    return loaded


@pytest.fixture(scope="session")
def sentencepiece_metadata(processor: sentencepiece.SentencePieceProcessor) -> dict[str, object]:
    """What a converter writes into a GGUF file for that model."""
    ids = range(processor.get_piece_size())
    tokens = [processor.id_to_piece(n) for n in ids]
    kinds = [
        2 if processor.is_unknown(n)
        else 3 if processor.is_control(n)
        else 6 if processor.is_byte(n)
        else 4 if tokens[n] == "<think>"
        else 1
        for n in ids
    ]  # fmt: skip
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [processor.get_score(n) for n in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def spm(sentencepiece_metadata: dict[str, object]) -> Tokenizer:
    return load_tokenizer_from_gguf(sentencepiece_metadata)
