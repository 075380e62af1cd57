"""Stop strings: nothing of one is ever shown, however the text was cut, and nothing else is lost."""

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.tokens import StopStrings

ALPHABET = "abc"


def run(stops, pieces, include=False):
    watcher = StopStrings(stops, include)
    shown = ""
    for piece in pieces:
        emitted, matched = watcher.push(piece)
        shown += emitted
        if matched is not None:
            return shown, matched
    return shown + watcher.flush(), None


def by_definition(stops, text):
    """(end, stop) of the stop string complete first, the longest of several that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


texts = st.text(ALPHABET, max_size=30)
stop_sets = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@given(st.lists(st.text(ALPHABET, max_size=6), max_size=12), stop_sets, st.booleans())
def test_text_ends_at_the_first_stop_however_it_is_cut(pieces, stops, include):
    text = "".join(pieces)
    expected = by_definition(stops, text)
    shown, matched = run(stops, pieces, include)
    if expected is None:
        assert (shown, matched) == (text, None)
        return
    end, stop = expected
    assert matched == stop
    assert shown == (text[:end] if include else text[: end - len(stop)])


@given(st.lists(st.text(ALPHABET, max_size=6), max_size=12), stop_sets)
def test_no_beginning_of_a_stop_leaks_and_nothing_else_is_held(pieces, stops):
    watcher = StopStrings(stops)
    text = shown = ""
    for piece in pieces:
        emitted, matched = watcher.push(piece)
        if matched is not None:
            return
        text, shown = text + piece, shown + emitted
        held = text[len(shown) :]
        open_ends = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        assert len(held) == max(open_ends)


def test_stop_over_three_pieces():
    watcher = StopStrings(("<end>",))
    assert watcher.push("hi <e") == ("hi ", None)
    assert watcher.push("n") == ("", None)
    assert watcher.push("d> more") == ("", "<end>")
    assert watcher.push("dropped") == ("", "<end>")
    assert watcher.flush() == ""


def test_without_stops_text_passes():
    watcher = StopStrings(())
    assert watcher.push("abc") == ("abc", None)
    assert watcher.flush() == ""
