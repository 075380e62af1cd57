"""Which tokens run in the next step, and where their keys and values live. Plain Python: no jax, no numpy."""

from jaxserve.scheduler.request import Request, Status
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.stats import SchedulerStats
from jaxserve.scheduler.step_plan import IN_FLIGHT_TOKEN, StepPlan, TokenEvent

__all__ = ["IN_FLIGHT_TOKEN", "Request", "Scheduler", "SchedulerStats", "Status", "StepPlan", "TokenEvent"]
