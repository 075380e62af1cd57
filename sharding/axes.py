"""Every logical axis: its name in sharding plans, its letter in array shapes, and what it counts.

The letters are the project's dimension key: jaxtyping shapes (`Float32[Array, "T N H"]`), einsum strings
("TNH,SNH->NTS") and name suffixes (`q_TNH`) use them in this meaning only. Which mesh axis a logical axis is cut
over is no business of this file; a plan says that.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One logical axis. name: as plans write it. letter: as shapes write it. meaning: what its size counts."""

    name: str
    letter: str
    meaning: str


AXES = (
    Axis(name="tokens", letter="T", meaning="tokens in this step"),
    Axis(name="sequences", letter="B", meaning="sequences"),
    Axis(name="keys", letter="S", meaning="keys attended"),
    Axis(name="model", letter="D", meaning="model width"),
    Axis(name="heads", letter="N", meaning="query heads"),
    Axis(name="kv_heads", letter="K", meaning="kv heads"),
    Axis(name="group", letter="G", meaning="query heads per kv head, N/K"),
    Axis(name="head", letter="H", meaning="head size"),
    Axis(name="latent", letter="C", meaning="latent size"),
    Axis(name="rope", letter="R", meaning="rope size"),
    Axis(name="ffn", letter="F", meaning="ffn width"),
    Axis(name="experts", letter="E", meaning="experts"),
    Axis(name="choices", letter="U", meaning="experts a router chooses from, on every device"),
    Axis(name="chosen_experts", letter="X", meaning="experts per token"),
    Axis(name="vocab", letter="V", meaning="vocabulary size"),
    Axis(name="pages", letter="P", meaning="pages"),
    Axis(name="page_tokens", letter="L", meaning="tokens per page"),
    Axis(name="sequence_pages", letter="M", meaning="pages per sequence"),
)

AXIS_BY_NAME = {axis.name: axis for axis in AXES}
AXIS_BY_LETTER = {axis.letter: axis for axis in AXES}
