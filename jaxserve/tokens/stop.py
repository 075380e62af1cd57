"""`StopStrings`: cuts a stream of text at the first stop string, and never lets the beginning of one out."""

from typing import final


@final
class StopStrings:
    """Watches one stream of text for stop strings.

    The stop string that is complete first wins (smallest end in the text; of several that end there, the longest).
    The result does therefore not depend on how the text was cut into pieces. With include the stop string is part of
    the emitted text. After a match everything further is dropped.
    """

    __slots__ = ("_beginnings", "_held", "_include", "_matched", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = stops
        self._include = include
        self._beginnings = _beginnings(stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string once it is found."""
        if not self._stops:
            return text, None
        if self._matched is not None:
            return "", self._matched
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            end, stop = match
            self._held, self._matched = "", stop
            return buffer[: end if self._include else end - len(stop)], stop
        keep = len(buffer) - self._num_held_chars(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], None

    def flush(self) -> str:
        """The text held back, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = [(buffer.find(stop) + len(stop), stop) for stop in self._stops if stop in buffer]
        return min(found, key=lambda match: (match[0], -len(match[1])), default=None)

    def _num_held_chars(self, buffer: str) -> int:
        """Length of the longest end of buffer that is a beginning of a stop string."""
        candidates = self._beginnings.get(buffer[-1:], ())
        return next((n for n, stop in candidates if buffer.endswith(stop[:n])), 0)


def _beginnings(stops: tuple[str, ...]) -> dict[str, list[tuple[int, str]]]:
    """By last character, the (length, stop string) of every beginning short of the whole, longest first.

    Most text ends in a character that no beginning ends in, or few do, so a push looks at next to nothing.
    """
    by_last: dict[str, list[tuple[int, str]]] = {}
    for stop in stops:
        for n in range(1, len(stop)):
            by_last.setdefault(stop[n - 1], []).append((n, stop))
    for candidates in by_last.values():
        candidates.sort(reverse=True)
    return by_last
