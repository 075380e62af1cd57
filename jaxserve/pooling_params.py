"""How one request wants the hidden states of its prompt made into one vector."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from jaxserve.errors import InvalidRequest

Pooling = Literal["mean", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """Choices of one embedding request, checked on construction.

    pooling: over the states after the model's last norm, "mean" averages those of all tokens (a BOS is one of them),
    "last" takes the last token's. dimensions: the first so many values only, for models trained so that they suffice
    (Matryoshka, arXiv 2205.13147); None takes all. normalize: scale to length 1, after the cut.

    Raises InvalidRequest naming the field.
    """

    pooling: Pooling = "mean"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            allowed = " or ".join(map(repr, get_args(Pooling)))
            raise InvalidRequest(f"pooling must be {allowed}, got {self.pooling!r:.100}", param="pooling")
        if not isinstance(self.normalize, bool):
            raise InvalidRequest(f"normalize must be true or false, got {self.normalize!r:.100}", param="normalize")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise InvalidRequest(
                f"dimensions must be an integer of at least 1, got {self.dimensions!r:.100}", param="dimensions"
            )

    def check(self, embedding_size: int) -> None:
        """Raises InvalidRequest when the model's vectors have fewer values than are asked for."""
        if self.dimensions is not None and self.dimensions > embedding_size:
            raise InvalidRequest(
                f"dimensions must be from 1 to {embedding_size:,}, which this model's vectors have; got "
                f"{self.dimensions:,}",
                param="dimensions",
            )

    def embedding(self, pooled: Sequence[float]) -> list[float]:
        """The vector that the caller gets: cut, scaled, and rounded to float32. Zeros cannot be scaled and stay."""
        values = list(pooled[: self.dimensions])
        length = math.sqrt(math.fsum(value * value for value in values))
        if self.normalize and length > 0:
            values = [value / length for value in values]
        return array("f", values).tolist()
