"""`SpecialText`: where text reads as a special token, or could with a neighbour's help. Knows strings only, no ids."""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, final

# Templates compare roles and build headers such as <|user|> from them, so these are never marked.
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "model", "ipython"})


@final
class SpecialText:
    """Finds the texts of special tokens, and the beginnings and ends of them that could be completed by a neighbour."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        names = sorted((name for name in special_tokens if name), key=len, reverse=True)
        self._alternatives = "|".join(map(re.escape, names))
        self._occurrence = re.compile(f"(?={self._alternatives})") if names else None
        self._beginnings = frozenset(name[:n] for name in names for n in range(1, len(name)))
        self._ends = frozenset(name[n:] for name in names for n in range(1, len(name)))
        self._max_chars = len(names[0]) if names else 0

    def positions(self, text: str) -> list[int]:
        """Where marks must go so that no special token can be read in text, nor across its borders."""
        if self._occurrence is None or text in KNOWN_ROLES:
            return []
        found = {match.start() + 1 for match in self._occurrence.finditer(text)}
        longest = min(len(text), self._max_chars - 1)
        found.update(len(text) - n + 1 for n in range(1, longest + 1) if text[-n:] in self._beginnings)
        if any(text[:n] in self._ends for n in range(1, longest + 1)) and not text[0].isspace():
            found.add(0)
        return sorted(found)

    def marked(self, value: Any, mark: str) -> Any:
        """value with marks in every string that needs them, keys included."""
        if isinstance(value, str):
            cuts = [0, *self.positions(value), len(value)]
            return mark.join(value[a:b] for a, b in pairwise(cuts))
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item, mark) for item in value]
        return value

    def split(self, text: str, mark: str) -> Iterable[tuple[str, str]]:
        """(stretch, special token after it) over text; the last special is empty."""
        parts = re.split(f"((?:{self._alternatives})(?!{re.escape(mark)}))", text)
        return zip(parts[::2], [*parts[1::2], ""], strict=True)
