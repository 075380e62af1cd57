"""What callers can ask about the experts of a mixture while it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.experts import ExpertReport, Rebalanced


@dataclass(frozen=True, kw_only=True)
class ExpertFunctions:
    """Of the executor, for the engine's thread."""

    report: Callable[[], ExpertReport]
    rebalance: Callable[[], Rebalanced]


class Experts:
    """The same for any thread; the answers come between two steps. Both raise ShuttingDown and EngineDied."""

    def __init__(self, ask: Callable[[Callable[[], Any]], Any], functions: ExpertFunctions) -> None:
        self._ask, self._functions = ask, functions

    def load(self) -> ExpertReport:
        """Tokens by layer and expert since the start, and how evenly devices share them."""
        return self._ask(self._functions.report)

    def rebalance(self) -> Rebalanced:
        """Moves experts between devices, and copies those asked for most into spare slots, so that the load since the
        start would have been even. No answer changes."""
        return self._ask(self._functions.rebalance)
