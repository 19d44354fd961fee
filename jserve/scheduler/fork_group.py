"""The sequences of one request that share the KV of its prompt (n, best_of)."""

from __future__ import annotations

from dataclasses import dataclass, field

from jserve.scheduler.sequence import Sequence, SequenceState


@dataclass(eq=False)
class ForkGroup:
    """Invariant: while a member, the carrier, computes the prompt in its slot, no other member enters one; members that
    come to the head of the queue are parked until then."""

    members: list[Sequence]
    carrier: Sequence | None = None
    parked: list[Sequence] = field(default_factory=list)

    def join(self, sequence: Sequence) -> None:
        self.members.append(sequence)
        sequence.group = self

    def running(self) -> list[Sequence]:
        return [one for one in self.members if one.state is SequenceState.RUNNING]
