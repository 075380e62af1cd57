"""The smallest change that would make a plan fit, by arithmetic on weights and cache."""

from typing import TYPE_CHECKING

from jaxserve.planning import analytic
from jaxserve.planning.request import PlanRequest

if TYPE_CHECKING:
    from jaxserve.planning.report import Planned

MAX_FACTOR = 1024


def advice(plan: "Planned", room_bytes: int) -> str:
    """What to change, in one line. room_bytes: what is left for the cache beside everything else."""
    request, spec = plan.request, plan.pages.spec
    pages, sequence_pages = room_bytes // spec.page_bytes, plan.pages.sequence_pages
    more = _more_devices(plan, room_bytes)
    if pages >= sequence_pages and request.batch > 1:
        fewer = f"--batch {min(request.batch - 1, pages // sequence_pages * request.data)}"
    elif pages >= 1:
        fewer = f"--batch {request.data} --context {min(plan.pages.tokens_in(pages), max(1, request.context // 2))}"
    else:
        return f"not even one page of cache is left beside the weights: {more}"
    return f"fewer tokens, {fewer}; or {more}"


def plan_options(request: PlanRequest) -> str:
    """The plan as options of a command."""
    sizes = f"-tp {request.tensor} -ep {request.expert}"
    return sizes if request.data == 1 else f"{sizes} -dp {request.data}"


def _more_devices(plan: "Planned", room_bytes: int) -> str:
    """The fewest devices, in multiples of those of the plan, whose share of weights and cache fits."""
    request = plan.request
    others = plan.capacity_bytes - room_bytes - plan.weights_bytes  # temporary bytes and the like
    factor = 2
    while factor <= MAX_FACTOR:
        for tensor, expert in ((request.tensor * factor, request.expert), (request.tensor, request.expert * factor)):
            larger = request.spread_over(tensor, expert, request.data)
            try:
                weights = sum(part.num_bytes for part in analytic.weight_parts(larger, plan.described))
                cache = analytic.cache_bytes(larger, analytic.device_pages(larger, plan.described))
            except ValueError:
                continue
            if weights + cache + others <= plan.capacity_bytes:
                return f"{larger.plan.num_devices} devices, {plan_options(larger)}"
        factor *= 2
    return "weights in fewer bits (--weights q8_0, q4_k)"
