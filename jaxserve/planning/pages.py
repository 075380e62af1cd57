"""The cache of a plan in pages, as the engine divides it: layers with a window may have page tables of their own."""

from dataclasses import dataclass
from typing import Any

from jaxserve.kv_cache import CacheSpec, cache_spec, cache_window
from jaxserve.layer_groups import LayerGroups, layer_groups
from jaxserve.planning.request import PlanRequest
from jaxserve.scheduler.page_need import SequenceNeed, page_need, sequence_need


@dataclass(frozen=True, kw_only=True)
class PagePlan:
    """spec: of one page. groups: of layers, None where all share a page table. need: of one sequence. context: tokens
    of a sequence. num_layers: of the model."""

    spec: CacheSpec
    groups: LayerGroups | None
    need: SequenceNeed
    context: int
    num_layers: int

    @property
    def max_pages(self) -> int:
        """Columns of a page table."""
        return -(-self.context // self.spec.page_size)

    @property
    def sequence_pages(self) -> int:
        """Pages that a sequence of the whole context holds."""
        return self.need.of_tokens(self.context)

    @property
    def token_bytes(self) -> float:
        """Bytes of one token in all layers."""
        return self.spec.page_bytes / self.spec.page_size * self.num_layers / self.spec.num_layers

    def tokens_in(self, num_pages: int) -> int:
        """Tokens that so many pages hold, in sequences of this context."""
        return max(0, num_pages) * self.max_pages * self.spec.page_size // self.sequence_pages


def page_plan(request: PlanRequest, config: Any) -> PagePlan:
    """The pages of a model of this config. ValueError for a type of cache that is not kept for it."""
    windows, page_size = getattr(config, "windows", ()), request.page_size
    max_pages, groups = -(-request.context // page_size), None
    if any(windows):
        held = page_need(max(window or 0 for window in windows), page_size, request.step_tokens).most
        groups = layer_groups(windows, page_size, held, max_pages)
    spec = cache_spec(
        config,
        page_size,
        request.cache_dtype,
        groups and groups.layers_per_group,
        platform=request.where.platform,
    )
    window, tables = cache_window(config), None
    if groups is not None:
        window, tables = groups.window, (groups.num_full, groups.num_windowed)
    elif window is not None and window >= request.context:
        window = None
    need = sequence_need(window, page_size, request.step_tokens, tables)
    return PagePlan(spec=spec, groups=groups, need=need, context=request.context, num_layers=config.num_layers)
