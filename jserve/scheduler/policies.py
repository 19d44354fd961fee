"""Who goes first: each policy gives a waiting sequence a rank, and the lowest rank enters, and keeps its blocks, first.

A rank is fixed when the sequence starts to wait.  Where it is a time of arrival plus a handicap, all waiting sequences
age alike: whoever has waited longer than the difference of two handicaps goes first, so no policy starves anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jserve.scheduler.sequence import Sequence

TOKENS_PER_CLASS = 1000
"""Tokens of work that weigh as much as one class of priority."""

Match = Callable[[Sequence], int]
"""Tokens of a sequence that the prefix cache holds now."""


@dataclass(frozen=True)
class PolicySettings:
    """What decides the order, and the latency that steps keep."""

    name: str = "fcfs"
    ageing_s: float = 60.0
    """Seconds of waiting that outweigh one class of priority, or 1,000 tokens of work."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of tenants under `fair`; others have 1."""
    target_tbt_s: float | None = None
    """Gap between tokens that steps with prefill keep; None: the token budget alone bounds them."""


class Policy(Protocol):
    window: int
    """How many of the lowest ranks are looked at again, by `now`, whenever one may enter; 1: none."""
    preempts: bool
    """A waiting sequence may take the place of a running one of a lower class."""

    def rank(self, sequence: Sequence) -> float:
        """Of a sequence that starts to wait, for the first time or after preemption."""

    def now(self, sequence: Sequence, match: Match) -> float:
        """The rank among those of the window."""

    def entered(self, sequence: Sequence) -> None:
        """It left the queue for a slot."""

    def ended(self, sequence: Sequence) -> None: ...


@dataclass
class Arrival:
    """First come, first served; a class of priority is worth `ageing_s` seconds of waiting."""

    ageing_s: float
    preempts: bool = False
    window: int = 1

    def rank(self, sequence: Sequence) -> float:
        return sequence.arrival + self.ageing_s * sequence.priority

    def now(self, sequence: Sequence, match: Match) -> float:
        return sequence.rank

    def entered(self, sequence: Sequence) -> None:
        pass

    def ended(self, sequence: Sequence) -> None:
        pass


@dataclass
class ShortestRemaining(Arrival):
    """The fewest tokens left to compute and to generate (max_tokens is what is known of the latter)."""

    def rank(self, sequence: Sequence) -> float:
        work = sequence.limit - sequence.num_output
        return super().rank(sequence) + self.ageing_s * work / TOKENS_PER_CLASS


@dataclass
class LongestPrefix(Arrival):
    """The most tokens in the prefix cache, looked at when somebody may enter, among those who have waited longest."""

    window: int = 32

    def now(self, sequence: Sequence, match: Match) -> float:
        return sequence.rank - self.ageing_s * match(sequence) / TOKENS_PER_CLASS


class FairShare:
    """Tenants get tokens in proportion to their weights (start-time fair queueing): a sequence's rank is the service
    its tenant had been promised before it, or the queue's virtual time where that is later."""

    window = 1
    preempts = False

    def __init__(self, weights: Mapping[str, float]):
        self._weights = weights
        self._promised: dict[str, float] = {}  # by tenant: tokens over weight
        self._virtual_time = 0.0

    def rank(self, sequence: Sequence) -> float:
        if sequence.num_preemptions:
            return sequence.rank  # paid for already
        start = max(self._virtual_time, self._promised.get(sequence.tenant, 0.0))
        self._promised[sequence.tenant] = start + sequence.limit / self._weight(sequence)
        return start + TOKENS_PER_CLASS * sequence.priority

    def now(self, sequence: Sequence, match: Match) -> float:
        return sequence.rank

    def entered(self, sequence: Sequence) -> None:
        self._virtual_time = max(self._virtual_time, sequence.rank)

    def ended(self, sequence: Sequence) -> None:
        """What it did not use goes back to its tenant; a tenant without debts is forgotten."""
        unused = (sequence.limit - sequence.num_known) / self._weight(sequence)
        left = self._promised.get(sequence.tenant, 0.0) - unused
        if left > self._virtual_time:
            self._promised[sequence.tenant] = left
        else:
            self._promised.pop(sequence.tenant, None)

    def _weight(self, sequence: Sequence) -> float:
        return self._weights.get(sequence.tenant, 1.0)


def parse_weights(text: str) -> dict[str, float]:
    """`red=2,blue=0.5` as a mapping.  ValueError says what is wrong."""
    weights = {}
    for part in filter(None, text.split(",")):
        tenant, _, weight = part.partition("=")
        try:
            weights[tenant.strip()] = float(weight)
        except ValueError:
            raise ValueError(f"{part!r}: expected tenant=weight") from None
        if not 0 < weights[tenant.strip()] < float("inf"):
            raise ValueError(f"{part!r}: a weight must be above 0")
    return weights


POLICIES = ("fcfs", "priority", "shortest-remaining", "longest-prefix", "fair")


def make_policy(settings: PolicySettings) -> Policy:
    """The policy of a name in POLICIES."""
    ageing = settings.ageing_s
    if settings.name == "fcfs":
        return Arrival(ageing)
    if settings.name == "priority":
        return Arrival(ageing, preempts=True)
    if settings.name == "shortest-remaining":
        return ShortestRemaining(ageing)
    if settings.name == "longest-prefix":
        return LongestPrefix(ageing)
    if settings.name == "fair":
        return FairShare(settings.tenant_weights)
    raise ValueError(f"policy is {settings.name!r}, expected one of {', '.join(POLICIES)}")
