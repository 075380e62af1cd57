"""Streamed text equals decoded text, and no character is shown before it is whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.tokens import Detokenizer


def stream(tokenizer, ids, prompt=(), skip_special=True):
    detokenizer = Detokenizer(tokenizer, prompt, skip_special)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]


def test_emoji_over_four_tokens_comes_whole(byte_level):
    ids = byte_level.encode("a😀b", add_special=False)
    assert len(ids) == 6
    assert stream(byte_level, ids) == ["a", "", "", "", "😀", "b", ""]


def test_emoji_by_byte_fallback_comes_whole(spm):
    ids = spm.encode("a😀b", add_special=False)
    assert "".join(stream(spm, ids)) == "a😀b"
    assert not any("\ufffd" in delta for delta in stream(spm, ids))


def test_unfinished_character_shows_at_the_end(byte_level):
    assert stream(byte_level, byte_level.encode("😀", add_special=False)[:3]) == ["", "", "", "\ufffd"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_character_begun_in_the_prompt(byte_level, cut):
    ids = byte_level.encode("x😀y", add_special=False)
    assert "".join(stream(byte_level, ids[1 + cut :], ids[: 1 + cut])) == "😀y"
    broken = [*ids[: 1 + cut], *byte_level.encode("y", add_special=False)]
    assert "".join(stream(byte_level, broken[1 + cut :], broken[: 1 + cut])) == "y"
    assert "".join(stream(byte_level, [], ids[: 1 + cut])) == ""


def test_special_tokens_hide_and_show(byte_level):
    ids = byte_level.encode("hel<|im_end|>lo", add_special=False)
    assert "".join(stream(byte_level, ids)) == "hello"
    assert "".join(stream(byte_level, ids, skip_special=False)) == "hel<|im_end|>lo"


def test_ids_beyond_the_vocabulary_have_no_text(byte_level):
    assert stream(byte_level, [byte_level.vocab_size, 97]) == ["", "a", ""]


def test_leading_space_belongs_to_the_start_of_a_text_only(spm):
    ids = spm.encode("the cat", add_special=False)
    assert "".join(stream(spm, ids)) == "the cat"
    assert "".join(stream(spm, ids, [spm.bos_token_id])) == "the cat"
    assert "".join(stream(spm, ids, spm.encode("a"))) == " the cat"


@given(st.data())
def test_any_bytes_stream_as_they_decode(byte_level, data):
    ids = data.draw(st.lists(st.sampled_from([*range(0x7E, 0x100), 256, 257, 258, 260]), max_size=12))
    skip = data.draw(st.booleans())
    assert "".join(stream(byte_level, ids, skip_special=skip)) == byte_level.decode(ids, skip_special=skip)


@given(st.data())
def test_any_pieces_stream_as_they_decode(spm, data):
    ids = data.draw(st.lists(st.integers(0, spm.vocab_size - 1), max_size=12))
    skip = data.draw(st.booleans())
    assert "".join(stream(spm, ids, skip_special=skip)) == spm.decode(ids, skip_special=skip)


@given(st.text(max_size=20), st.integers(0, 40))
def test_text_after_a_prompt_is_the_rest(byte_level, text, cut):
    ids = byte_level.encode(text, add_special=False)
    prompt = byte_level.decode(ids[:cut]).rstrip("\ufffd")
    assert (
        "".join(stream(byte_level, ids[cut:], ids[:cut])) == byte_level.decode(ids)[len(prompt) :] or "\ufffd" in text
    )
