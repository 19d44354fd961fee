"""The sequences of one request that share KV: its samples (n, best_of), or its beams."""

from __future__ import annotations

from dataclasses import dataclass, field

from jserve.sampling.beam_search import BeamSearch
from jserve.scheduler.sequence import Sequence, SequenceState


@dataclass(eq=False)
class ForkGroup:
    """Invariants: while a sample, the carrier, computes the prompt in its slot, no other sample enters one; those that
    come to the head of the queue are parked until then.  Beams enter and leave together, as many as beam_width."""

    search: BeamSearch | None = None
    """Chooses the beams; None: the members are samples."""
    members: list[Sequence] = field(default_factory=list)
    carrier: Sequence | None = None
    parked: list[Sequence] = field(default_factory=list)
    live: list[Sequence] = field(default_factory=list)
    """Beams: the member of each running beam, in the order of the search; the others hold a slot in reserve."""
    forks: dict[Sequence, tuple[Sequence, int]] = field(default_factory=dict)
    """Beams that came back without their KV: from whom they will be forked, and at how many tokens."""

    def join(self, sequence: Sequence) -> None:
        self.members.append(sequence)
        sequence.group = self
        if self.search is not None and not self.live:
            self.live.append(sequence)

    def running(self) -> list[Sequence]:
        return [one for one in self.members if one.state is SequenceState.RUNNING]

    def unfinished(self) -> list[Sequence]:
        return [one for one in self.members if not one.finished]


def search_of(sequence: Sequence) -> BeamSearch | None:
    """The search that a sequence is a beam of."""
    return None if sequence.group is None else sequence.group.search
