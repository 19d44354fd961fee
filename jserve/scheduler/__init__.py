"""Decides, once a step, which tokens of which sequences are computed.  Imports neither jax nor a model."""

from jserve.scheduler.plan import StepPlan
from jserve.scheduler.scheduler import Scheduler, SchedulerLimits
from jserve.scheduler.sequence import Sequence, SequenceState

__all__ = ["Scheduler", "SchedulerLimits", "Sequence", "SequenceState", "StepPlan"]
