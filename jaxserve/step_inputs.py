"""Every padded array of one step, in and out, each with its shape; and how the inputs travel in one transfer.

Tokens lie in row order. The first `single_rows` rows own one token each (decodes, one-token chunks; padding too), the
`chunk_rows` after them own the chunk tokens. A row with drafts is a row with 1 + drafts tokens.
"""

from dataclasses import dataclass, field, replace
from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxserve.layer_groups import GroupedLayout, LayerGroups, Paging, window_tables
from pallas_kernels.pytree import pytree
from pallas_kernels.ragged import RaggedLayout


@dataclass(frozen=True, kw_only=True, order=True)
class StepShape:
    """A bucket: the padded sizes of one compiled step. groups: of layers, where these do not share one page table."""

    single_rows: int
    chunk_tokens: int
    chunk_rows: int
    max_pages: int
    groups: LayerGroups | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.single_rows + self.chunk_tokens

    @property
    def num_rows(self) -> int:
        """B."""
        return self.single_rows + self.chunk_rows

    def __str__(self) -> str:
        if not self.chunk_tokens:
            return f"decode {self.single_rows}"
        return f"decode {self.single_rows} + prefill {self.chunk_tokens} in {self.chunk_rows}"


@pytree
@dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """What one step needs to choose a token for each of R rows.

    top_k: 0 or less keeps all tokens. positions: where the drawn token will stand, which is the number of tokens before
    it. slots: the row's place in SlotState. mask_stops: true while fewer than min_tokens were generated.
    wants_logprobs: read by the step, not by the draw.
    """

    temperature: Float32[Array, "R"]
    top_p: Float32[Array, "R"]
    min_p: Float32[Array, "R"]
    repetition_penalty: Float32[Array, "R"]
    presence_penalty: Float32[Array, "R"]
    frequency_penalty: Float32[Array, "R"]
    top_k: Int32[Array, "R"]
    seed: UInt32[Array, "R 2"]
    positions: Int32[Array, "R"]
    num_prompt_tokens: Int32[Array, "R"]
    slots: Int32[Array, "R"]
    mask_stops: Bool[Array, "R"]
    wants_logprobs: Bool[Array, "R"]


# Columns of the int32 matrix that carries the sampling parameters; floats and unsigned words travel as their bits.
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INT_COLUMNS = ("top_k", "seed_low", "seed_high", "min_tokens", "num_prompt_tokens", "wants_logprobs")
NUM_COLUMNS = len(FLOAT_COLUMNS) + len(INT_COLUMNS)


@pytree
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The inputs of one step of T tokens in B rows.

    token_ids: -1 where the token was drawn by an earlier step and is known on the device only.
    positions: position of each token; tokens of padding have any value and no effect.
    target_ids: the prompt token that follows each token, -1 where no prompt logprob is wanted.
    slots: the row of the per-slot state that belongs to each row; padding rows use the spare last slot.
    draws: 1 where the row's last token is its newest, so that a token is drawn from its logits.
    pooling: what is to become of the row's hidden states; a code of engine/pooling.py, 0 for nothing.
    layout: how tokens lie in rows, with the page table of the first group of layers; paging: with all page tables.
    """

    token_ids: Int32[Array, "T"]
    target_ids: Int32[Array, "T"]
    slots: Int32[Array, "B"]
    draws: Int32[Array, "B"]
    pooling: Int32[Array, "B"]
    layout: RaggedLayout
    paging: Paging
    sampling: SamplingInputs
    wants_prompt_logprobs: Int32[Array, ""]


@pytree
@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities at R places.

    rank: 1 for the likeliest token. top_ids, top_logprobs: the likeliest tokens in falling order, the smaller id first
    on ties; -1 with -inf where the vocabulary has fewer.
    """

    chosen: Float32[Array, "R"]
    rank: Int32[Array, "R"]
    top_ids: Int32[Array, "R num_top"]
    top_logprobs: Float32[Array, "R num_top"]


@pytree
@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """Drawn token per row; log probabilities and pooled hidden states (zeros where no row wants them)."""

    token_ids: Int32[Array, "B"]
    logprobs: TokenLogprobs
    prompt_logprobs: TokenLogprobs
    pooled: Float32[Array, "B D"]


@dataclass(frozen=True)
class _Field:
    name: str
    shape: tuple[int, ...]
    offset: int = field(default=0)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@cache
def packing(shape: StepShape) -> tuple[tuple[_Field, ...], int]:
    """Where each array of a bucket lies in its int32 buffer, and the buffer's length."""
    tokens, rows = shape.num_tokens, shape.num_rows
    arrays = (
        ("token_ids", (tokens,)),
        ("target_ids", (tokens,)),
        ("query_starts", (rows + 1,)),
        ("kv_lengths", (rows,)),
        ("slots", (rows,)),
        ("draws", (rows,)),
        ("pooling", (rows,)),
        ("sampling", (rows, NUM_COLUMNS)),
        ("wants_prompt_logprobs", ()),
        ("page_table", (rows, shape.max_pages)),
    )
    if shape.groups is not None:
        arrays += (
            ("more_page_tables", (shape.groups.num_full - 1, rows, shape.max_pages)),
            ("window_pages", (shape.groups.num_windowed, rows, shape.groups.window_pages)),
        )
    fields, offset = [], 0
    for name, dims in arrays:
        fields.append(_Field(name, dims, offset))
        offset += fields[-1].size
    return tuple(fields), offset


def buffer_views(shape: StepShape) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A zeroed host buffer for one step and a writable view of each array in it."""
    fields, length = packing(shape)
    buffer = np.zeros(length, np.int32)
    return buffer, {f.name: buffer[f.offset : f.offset + f.size].reshape(f.shape) for f in fields}


def unpack(buffer: Int32[Array, "W"], shape: StepShape) -> StepInputs:
    """The step's inputs from the buffer, inside the jitted step."""
    fields, _ = packing(shape)
    part = {f.name: buffer[f.offset : f.offset + f.size].reshape(f.shape) for f in fields}
    layout = RaggedLayout(
        query_starts=part["query_starts"],
        kv_lengths=part["kv_lengths"],
        page_table=part["page_table"],
        num_single_rows=shape.single_rows,
    )
    return StepInputs(
        token_ids=part["token_ids"],
        target_ids=part["target_ids"],
        slots=part["slots"],
        draws=part["draws"],
        pooling=part["pooling"],
        layout=layout,
        paging=layout if shape.groups is None else _grouped(layout, part, shape.groups),
        sampling=_unpack_sampling(part["sampling"], part["kv_lengths"], part["slots"]),
        wants_prompt_logprobs=part["wants_prompt_logprobs"],
    )


def _grouped(layout: RaggedLayout, part: dict[str, Array], groups: LayerGroups) -> GroupedLayout:
    tables = (*part["more_page_tables"], *window_tables(part["window_pages"], layout, groups))
    others = tuple(replace(layout, page_table=table) for table in tables)
    return GroupedLayout(layouts=(layout, *others), places=groups.places)


def _unpack_sampling(
    matrix: Int32[Array, "B C"], kv_lengths: Int32[Array, "B"], slots: Int32[Array, "B"]
) -> SamplingInputs:
    floats = lax.bitcast_convert_type(matrix[:, : len(FLOAT_COLUMNS)], jnp.float32)
    ints = {name: matrix[:, len(FLOAT_COLUMNS) + i] for i, name in enumerate(INT_COLUMNS)}
    seed = jnp.stack([ints["seed_low"], ints["seed_high"]], axis=1)
    return SamplingInputs(
        **{name: floats[:, i] for i, name in enumerate(FLOAT_COLUMNS)},
        top_k=ints["top_k"],
        seed=lax.bitcast_convert_type(seed, jnp.uint32),
        positions=kv_lengths,
        num_prompt_tokens=ints["num_prompt_tokens"],
        slots=slots,
        mask_stops=kv_lengths - ints["num_prompt_tokens"] < ints["min_tokens"],
        wants_logprobs=ints["wants_logprobs"] > 0,
    )
