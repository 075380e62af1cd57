"""Floating-point operations of a traced program, counted from its jaxpr: a scan's length is known there, which the
compilers' own cost analysis ignores (it counts a loop's body once).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

type Trips = Callable[[bool, int], float]
"""(whether the loop holds another one, how many loops of open length are around it) -> how often it runs."""


def matmul_flops(jaxpr: Jaxpr, *, trips: Trips, ragged_rows: Callable[[int, int], float], depth: int = 0) -> float:
    """Operations of all matrix products, of one device where the program is spread by shard_map.

    trips: of loops whose length depends on data. ragged_rows: of a ragged product with so many rows and groups, rows
    times groups that are really multiplied. Of a conditional the cheapest branch counts, as in hlo.py.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            total += _dot_flops(eqn)
            continue
        if eqn.primitive.name.startswith("ragged_dot"):
            total += _ragged_flops(eqn, ragged_rows)
            continue
        is_open = eqn.primitive.name == "while"
        inner = [matmul_flops(sub, trips=trips, ragged_rows=ragged_rows, depth=depth + is_open) for sub in _bodies(eqn)]
        if not any(inner):
            continue
        if eqn.primitive.name == "cond":
            total += min(inner)
        elif is_open:
            total += sum(inner) * trips(_holds_loop(eqn), depth)
        else:
            total += sum(inner) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    return total


def _dot_flops(eqn: JaxprEqn) -> float:
    contracted = eqn.params["dimension_numbers"][0][0]
    left = _shape(eqn.invars[0])
    return 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(left[axis] for axis in contracted)


def _ragged_flops(eqn: JaxprEqn, ragged_rows: Callable[[int, int], float]) -> float:
    """Rows [M, K] with groups [G, K, N]."""
    rows, width = _shape(eqn.invars[0])
    groups, _, columns = _shape(eqn.invars[1])
    return 2.0 * ragged_rows(rows, groups) * width * columns


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            sub = getattr(item, "jaxpr", item)
            if hasattr(sub, "eqns"):
                yield sub


def _holds_loop(eqn: JaxprEqn) -> bool:
    """Whether a loop of open length with products in it stands inside."""
    pending = list(_bodies(eqn))
    while pending:
        for inner in pending.pop().eqns:
            if inner.primitive.name == "while" and _multiplies(inner):
                return True
            pending += _bodies(inner)
    return False


def _multiplies(eqn: JaxprEqn) -> bool:
    return any(
        inner.primitive.name == "dot_general" or _multiplies(inner) for body in _bodies(eqn) for inner in body.eqns
    )
