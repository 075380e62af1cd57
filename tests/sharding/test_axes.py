"""The dimension key is a key: one letter, one name, one meaning."""

import pytest

from sharding.axes import AXES, AXIS_BY_LETTER, AXIS_BY_NAME


def test_letters_are_single_capitals_and_names_are_identifiers():
    assert all(len(axis.letter) == 1 and axis.letter.isupper() for axis in AXES)
    assert all(axis.name.isidentifier() and axis.name.islower() for axis in AXES)


def test_nothing_is_named_twice():
    assert len(AXIS_BY_LETTER) == len(AXIS_BY_NAME) == len({axis.meaning for axis in AXES}) == len(AXES)


def test_the_key_has_the_letters_of_the_house_style():
    assert {axis.letter for axis in AXES} == set("TBSDNKGHCRFEUXVPLM")


@pytest.mark.parametrize(("letter", "name"), [("T", "tokens"), ("N", "heads"), ("K", "kv_heads"), ("L", "page_tokens")])
def test_letters_find_their_axis(letter, name):
    assert AXIS_BY_LETTER[letter] is AXIS_BY_NAME[name]
