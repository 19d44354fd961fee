"""Decides, once a step, which tokens of which sequences are computed.  Imports neither jax nor a model."""

from jserve.scheduler.limits import SchedulerLimits
from jserve.scheduler.plan import StepPlan
from jserve.scheduler.policies import POLICIES, PolicySettings
from jserve.scheduler.preemption import PreemptionSettings
from jserve.scheduler.scheduler import Scheduler
from jserve.scheduler.sequence import Sequence, SequenceState

__all__ = [
    "POLICIES", "PolicySettings", "PreemptionSettings", "Scheduler", "SchedulerLimits", "Sequence", "SequenceState",
    "StepPlan",
]
