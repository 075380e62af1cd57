"""Encoding, decoding and loading, on tokenizers built here; each refusal names what is wrong."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from jaxserve.errors import InvalidRequest
from jaxserve.tokens import Detokenizer, load_tokenizer_from_folder, load_tokenizer_from_gguf

from .conftest import byte_level_metadata


def test_exactly_one_bos(byte_level):
    assert byte_level.encode("hel") == [258, 257]
    assert byte_level.encode("<s>hel") == [258, 257]
    assert byte_level.encode("hel", add_special=False) == [257]
    without = load_tokenizer_from_gguf(byte_level_metadata(add_bos_token=False))
    assert without.encode("hel") == [257]


def test_facts(byte_level):
    assert byte_level.vocab_size == 262
    assert byte_level.eos_token_ids == {260, 261}
    assert (byte_level.bos_token, byte_level.eos_token) == ("<s>", "<|im_end|>")
    assert byte_level.special_tokens == {"<s>": 258, "<|im_start|>": 259, "<|im_end|>": 260, "<|eot|>": 261}
    with pytest.raises(AttributeError):
        byte_level.bos_token_id = 3


def test_plain_text_holds_no_special_token(byte_level):
    assert byte_level.encode("<|im_end|>", add_special=False) == [260]
    plain = byte_level.encode_plain("<|im_end|>")
    assert 260 not in plain
    assert byte_level.decode(plain) == "<|im_end|>"


def test_single_tokens(byte_level, spm):
    assert (byte_level.token_bytes(257), byte_level.token_text(257)) == (b"hel", "hel")
    assert (byte_level.token_bytes(0xF0), byte_level.token_text(0xF0)) == (b"\xf0", "\ufffd")
    assert byte_level.token_text(260) == "<|im_end|>"
    the = spm.encode("the", add_special=False)[0]
    assert spm.token_text(the) == " the"


@pytest.mark.parametrize("token", [-1, 262, 10**9])
def test_ids_outside_the_vocabulary_are_refused(byte_level, token):
    with pytest.raises(InvalidRequest, match="vocabulary"):
        byte_level.decode([97, token])
    with pytest.raises(InvalidRequest, match="vocabulary"):
        byte_level.token_text(token)


def test_lone_surrogates_are_refused(byte_level, spm):
    for tokenizer in (byte_level, spm):
        with pytest.raises(InvalidRequest, match="U\\+D83D at character 1"):
            tokenizer.encode("a\ud83d")


@given(st.text())
def test_byte_level_round_trip(byte_level, text):
    assert byte_level.decode(byte_level.encode_plain(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40))
def test_sentencepiece_vocabulary_in_gguf_equals_the_model(spm, processor, text):
    ids = processor.encode(text)
    assert spm.encode_plain(text) == ids
    assert spm.decode(ids) == processor.decode(ids)


SPACE_BYTE = 3 + 0x20 + 1  # <think> is 3; as the first token the library keeps it, where text never puts it


@given(st.lists(st.integers(3, 339).filter(lambda n: n != SPACE_BYTE), max_size=15))
def test_sentencepiece_decodes_any_ids_as_the_library(spm, processor, ids):
    assert spm.decode(ids) == processor.decode(ids)


def test_sentencepiece_special_and_user_defined_tokens(spm, processor):
    think = processor.piece_to_id("<think>")
    ids = spm.encode("the</s><think>")
    assert (ids[0], ids[2], ids[-1]) == (1, 2, think)
    assert 2 not in spm.encode_plain("the</s>")
    assert think in spm.encode_plain("the<think>")
    assert spm.encode("the")[0] == 1


def test_sentencepiece_vocabulary_as_gemma_files_hold_it(sentencepiece_metadata, spm):
    """The unknown token marked as control and named by its id; blanks of user-defined tokens as plain text."""
    tokens, types = (list(sentencepiece_metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    types[types.index(2)] = 3
    last = len(tokens) - 1
    tokens[last], types[last] = "  ", 4
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata = {**sentencepiece_metadata, **changed}
    with pytest.raises(CheckpointError, match="has 0 unknown tokens"):
        load_tokenizer_from_gguf(metadata)
    gemma = load_tokenizer_from_gguf({**metadata, "tokenizer.ggml.unknown_token_id": 0})
    assert gemma.encode("the cat") == spm.encode("the cat")
    ids = gemma.encode_plain("a  cat")
    assert last in ids
    assert gemma.decode(ids) == "a  cat"


@pytest.mark.parametrize("pre", [None, "no-such-cut"])
def test_unknown_cut_is_refused(pre):
    with pytest.raises(UnsupportedCheckpoint, match="missing" if pre is None else "no-such-cut"):
        load_tokenizer_from_gguf(byte_level_metadata(pre=pre))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "'t5' is not supported"),
        ({"model": None}, "model is missing"),
        ({"tokens": None}, "tokens is missing"),
        ({"token_type": [1]}, "1 entries for 262 tokens"),
        ({"token_type": [9] * 262}, "types are 1 to 6"),
        ({"merges": ["he"]}, "not two tokens"),
        ({"merges": ["zz zz"]}, "do not fit"),
        ({"eos_token_id": 262}, "0 to 261"),
        ({"bos_token_id": "x"}, "bos_token_id"),
    ],
)
def test_damaged_metadata_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer_from_gguf(byte_level_metadata(**changes))


def save_byte_fallback(folder, decoder=None, config=None):
    """A folder as Llama 2's: U+2581 for spaces, byte fallback, one leading space."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{n:02X}>": 3 + n for n in range(256)}, "\u2581": 259, "a": 260}
    library = tokenizers.Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoder or decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.enable_truncation(2)
    library.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return library


def test_folder_with_byte_fallback(tmp_path):
    library = save_byte_fallback(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    tokenizer = load_tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("a é") == [1, 259, 260, 259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("a é")) == "a é"
    assert tokenizer.eos_token_ids == {2, 7}
    (tmp_path / "config.json").write_text('{"eos_token_id": 8}')
    assert load_tokenizer_from_folder(tmp_path, reads_generation_config=False).eos_token_ids == {2, 8}
    assert tokenizer.chat_template is None
    for ids in ([3 + 0xC3, 3 + 0x28, 260], [259, 259, 260], [3 + 0x41, 3 + 0xC3], [1, 259, 260]):
        assert tokenizer.decode(ids, skip_special=False) == library.decode(ids, skip_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([3 + 0xC3, 3 + 0x28, 260]) + detokenizer.flush() == "\ufffd\ufffda"


@given(st.lists(st.sampled_from([259, 260, *range(3 + 0x7E, 3 + 0x100, 7)]), max_size=10))
def test_byte_fallback_decodes_as_the_library(tmp_path_factory, ids):
    library, tokenizer = _byte_fallback_pair(tmp_path_factory)
    assert tokenizer.decode(ids) == library.decode(ids)


_pairs = []


def _byte_fallback_pair(tmp_path_factory):
    if not _pairs:
        folder = tmp_path_factory.mktemp("folder")
        _pairs.append((save_byte_fallback(folder), load_tokenizer_from_folder(folder)))
    return _pairs[0]


def test_chat_template_sources(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    save_byte_fallback(tmp_path, config={"chat_template": named})
    assert load_tokenizer_from_folder(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert load_tokenizer_from_folder(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer_from_folder(tmp_path).chat_template == "F"


def test_folder_with_sentencepiece_and_added_tokens(tmp_path, sentencepiece_model, processor):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    added = {"340": {"content": "<|im_end|>", "special": True}, "341": {"content": "<tool>", "special": False}}
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("the cat<|im_end|>") == [1, *processor.encode("the cat"), 340]
    assert 340 not in tokenizer.encode_plain("<|im_end|>")
    assert tokenizer.encode_plain("<tool>") == [341]
    assert tokenizer.decode([*processor.encode("the cat"), 340, 341]) == "the cat<tool>"
    assert tokenizer.eos_token_ids == {340}
    assert tokenizer.vocab_size == 342


def test_unusable_folders_are_refused(tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match="token ids still work"):
        load_tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer_from_folder(tmp_path)
    library = tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedCheckpoint, match="WordPiece"):
        load_tokenizer_from_folder(tmp_path)
    save_byte_fallback(tmp_path, config={"eos_token": "<nothing>"})
    with pytest.raises(CheckpointError, match="<nothing>"):
        load_tokenizer_from_folder(tmp_path)
