"""Who waits for a prefix that another sequence is computing, instead of computing it a second time.

Blocks become findable when the results of the step that wrote them are on the host; without this, requests that come
together would compute their common beginning once each.
"""

from __future__ import annotations

import numpy as np

from jserve.kv import BlockManager
from jserve.scheduler.sequence import Sequence, SequenceState


class SharedPrefixes:
    """Invariant: who waits here waits for a sequence that runs and has yet to compute something that both begin with."""

    def __init__(self, blocks: BlockManager, min_tokens: int, most: int):
        """min_tokens: waiting for fewer is not worth while; most: how many may wait, which bounds the work of a step."""
        self._blocks = blocks
        self._min_tokens = max(min_tokens, blocks.block_size)
        self._most = most
        self._computing: dict[tuple[bytes, bytes], list[Sequence]] = {}  # by salt and first block
        self._waiting: dict[Sequence, dict[Sequence, int]] = {}  # for whom -> who waits, and for how many tokens
        self.num_waits = 0

    def entered(self, sequence: Sequence) -> None:
        """A sequence that got a slot may be waited for, if its prompt fills a block: the output of beams may change."""
        fills_block = sequence.num_prompt >= self._blocks.block_size
        if self._blocks.has_prefix_cache and fills_block and self._num_missing(sequence) >= self._min_tokens:
            self._computing.setdefault(self._key(sequence), []).append(sequence)

    def ended(self, sequence: Sequence) -> None:
        """A sequence that entered, perhaps more than once, is finished: nothing here keeps it."""
        key = self._key(sequence)
        if key in self._computing:
            self._computing[key] = [one for one in self._computing[key] if one is not sequence]
            if not self._computing[key]:
                del self._computing[key]

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence at the head of the queue had better wait; if so it waits here, until `take_ready`."""
        if not self._computing or not sequence.use_prefix_cache or sequence.away is not None:
            return False
        key = self._key(sequence)
        computing = [one for one in self._computing.pop(key, ()) if _runs(one) and self._num_missing(one) > 0]
        if not computing:
            return False
        self._computing[key] = computing
        shared = {one: self._num_shared(sequence, one) for one in computing}
        best = max(computing, key=shared.__getitem__)
        num_found = self._blocks.match(sequence.tokens[: sequence.num_known], sequence.salt)
        if shared[best] - num_found < self._min_tokens:
            return False
        self._waiting.setdefault(best, {})[sequence] = shared[best]
        self.num_waits += 1
        return True

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def is_full(self) -> bool:
        return bool(self._waiting) and self.num_waiting >= self._most

    def forget(self, sequence: Sequence) -> bool:
        """A sequence ends; says whether it waited here."""
        for one, waiting in self._waiting.items():
            if waiting.pop(sequence, None) is not None:
                if not waiting:
                    del self._waiting[one]
                return True
        return False

    def take_ready(self) -> list[Sequence]:
        """Those who need not wait any more: what they share is there, or who computed it is gone."""
        ready = []
        for one, waiting in list(self._waiting.items()):
            num_computed = self._blocks.num_computed(one.slot) if _runs(one) else None
            for sequence, needed in list(waiting.items()):
                if num_computed is None or num_computed >= needed:
                    del waiting[sequence]
                    ready.append(sequence)
            if not waiting:
                del self._waiting[one]
        return ready

    def _key(self, sequence: Sequence) -> tuple[bytes, bytes]:
        return sequence.salt, sequence.tokens[: self._blocks.block_size].tobytes()

    def _num_missing(self, sequence: Sequence) -> int:
        return sequence.num_known - self._blocks.num_computed(sequence.slot)

    def _num_shared(self, sequence: Sequence, other: Sequence) -> int:
        """Tokens of whole blocks that both begin with, the last token of `sequence` left out."""
        count = min(sequence.num_known - 1, other.num_known)
        differs = np.flatnonzero(sequence.tokens[:count] != other.tokens[:count])
        count = int(differs[0]) if len(differs) else count
        return count - count % self._blocks.block_size


def _runs(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.RUNNING
