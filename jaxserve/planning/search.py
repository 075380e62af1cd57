"""Which plan for a topology: all that use every device, best first by the estimate."""

from collections.abc import Iterator
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.planning.described_model import DescribedModel
from jaxserve.planning.report import Planned, plan_report, planned
from jaxserve.planning.request import PlanRequest


def ranked_plans(request: PlanRequest, described: DescribedModel) -> list[Planned]:
    """Every plan of this topology that can cut the model, best first: those that fit before those that do not, then
    by tokens decoded per second, then by how much cache they have room for. ConfigError where there is none."""
    found, refused = [], {}
    for tensor, expert, data in _sizes(request.where.num_devices):
        if data > request.batch:
            continue  # groups without a request
        each = request.spread_over(tensor, expert, data)
        try:
            found.append(planned(each, described))
        except ValueError as error:
            refused[str(each.plan)] = str(error)
    if not found:
        last = "; ".join(f"{plan}: {why}" for plan, why in list(refused.items())[:3])
        raise ConfigError(f"{request.where}: no plan over all devices can cut this model ({last})")
    return sorted(found, key=_merit, reverse=True)


def _sizes(num_devices: int) -> Iterator[tuple[int, int, int]]:
    """All (tensor, expert, data) with this product."""
    for tensor in range(1, num_devices + 1):
        rest, odd = divmod(num_devices, tensor)
        if not odd:
            yield from ((tensor, expert, rest // expert) for expert in range(1, rest + 1) if rest % expert == 0)


def _merit(plan: Planned) -> tuple[Any, ...]:
    report = plan_report(plan, {}, None)
    memory = report["per_device"]
    short = 0 if report["fits"] else memory["total_bytes"] - memory["capacity_bytes"]
    return report["fits"], -short, report["decode"]["tokens_per_second"], report["kv_capacity_tokens"]
