"""The scheduler's decisions, one short JSON line each, so that `jserve replay` can make them again without a model.

Of prompts and outputs the log holds lengths and one keyed hash a full block: enough to tell equal prefixes, nothing to
read.  The key is drawn when the log is opened and kept nowhere.  Written by the engine thread.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jserve.engine.outputs import StepResult
from jserve.kv import BlockManager, GroupSpec
from jserve.kv.disk_tier import BlockStore
from jserve.request import FinishReason
from jserve.scheduler import Scheduler, Sequence, StepPlan
from jserve.scheduler.fork_group import ForkGroup

log = logging.getLogger(__name__)

VERSION = 1
LINES_PER_FLUSH = 64


@dataclass(frozen=True)
class KvSettings:
    """What a block manager is made from, as far as decisions depend on it."""

    windows: tuple[int | None, ...]
    """Of each layer group."""
    num_blocks: tuple[int, ...]
    block_size: int
    num_slots: int
    max_blocks_per_seq: int
    prefix_cache: bool
    num_host_blocks: tuple[int, ...] | None = None
    """To swap to, of each layer group, block 0 included; None: no swapping."""
    host_tier: bool = False
    """Cached blocks move there too."""

    def make(self, root_key: bytes = b"", disk: BlockStore | None = None) -> BlockManager:
        return BlockManager(
            groups=[GroupSpec(window) for window in self.windows],
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_slots=self.num_slots,
            max_blocks_per_seq=self.max_blocks_per_seq,
            prefix_cache=self.prefix_cache,
            root_key=root_key,
            num_host_blocks=self.num_host_blocks,
            host_tier=self.host_tier,
            disk=disk,
        )


class StepLog:
    """Events in their order: a(rrival), e(nd from outside), p(lan), r(esult), f(lush), x (a step broke)."""

    def __init__(self, path: str | Path, scheduler: Scheduler, kv: KvSettings):
        self._path = path
        self._file = open(path, "w")
        self._gave_up = False
        self._scheduler = scheduler
        self._key = secrets.token_bytes(16)
        longest = kv.max_blocks_per_seq * kv.block_size
        random = np.random.default_rng(int.from_bytes(self._key, "big"))
        self._factors = random.integers(1, 2**63, longest, dtype=np.uint64) | np.uint64(1)
        self._block_size = kv.block_size
        self._plans = PlanEncoder()
        self._num_lines = 0
        policy = dataclasses.asdict(scheduler.policy)
        policy["tenant_weights"] = {self._hide(name): weight for name, weight in policy["tenant_weights"].items()}
        self._write(
            {
                "jserve_step_log": VERSION,
                "limits": dataclasses.asdict(scheduler.limits),
                "kv": dataclasses.asdict(kv),
                "policy": policy,
                "preemption": dataclasses.asdict(scheduler.preemption),
            }
        )

    def arrived(self, sequence: Sequence) -> None:
        """After scheduler.add."""
        blocks = self._block_hashes(sequence.tokens[: sequence.num_prompt])
        record = {
            "a": sequence.order,
            "prompt": sequence.num_prompt,
            "max": 0 if sequence.prompt_only else sequence.limit - sequence.num_prompt,
            "at": sequence.arrival,
            "blocks": base64.b64encode(blocks.tobytes()).decode(),
        }
        if sequence.group is not None and sequence is not sequence.group.members[0]:
            record["of"] = sequence.group.members[0].order
        if sequence.search is not None:
            record["beams"] = sequence.sampling.beam_width
        if sequence.priority:
            record["priority"] = sequence.priority
        if sequence.salt:
            record["salt"] = self._hide(sequence.salt)
        if sequence.tenant:
            record["tenant"] = self._hide(sequence.tenant)
        if not sequence.use_prefix_cache:
            record["no_cache"] = True
        self._write(record)

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence was ended by somebody else than a step: an abort, a stop string."""
        self._write({"e": sequence.order, "reason": reason.value})

    def planned(self, plan: StepPlan | None) -> None:
        self._write({"p": self._plans.encode(plan, self._scheduler)})

    def jumped(self, plan: StepPlan, forced: dict[int, list[int]]) -> None:
        """After scheduler.jump: how many tokens are known from the sampled one on, and whether the output ends there."""
        sequences = plan.sampled_sequences()
        self._write({"j": [
            [place, len(token_ids), int(token_ids[-1] in sequences[place].stop_ids)]
            for place, token_ids in forced.items()
        ]})

    def applied(self, plan: StepPlan, result: StepResult) -> None:
        stopped = [sequence.order for sequence, reason in result.ended if reason is FinishReason.STOP]
        size = self._block_size
        borders = [
            [sequence.order, self._hash_up_to(sequence, sequence.num_known)]
            for sequence in result.sequences
            if sequence.num_known % size == 0
        ]
        inner = [  # of jumps; where a sequence stands is above
            [sequence.order, end - sequence.num_known, self._hash_up_to(sequence, end)]
            for sequence, token_ids in result.forced.items()
            for end in range(sequence.num_known - len(token_ids), sequence.num_known)
            if end % size == 0
        ]
        record: dict[str, Any] = {"r": plan.step_id, "s": result.output.device_seconds}
        if stopped:
            record["stop"] = stopped
        if result.failed:
            record["failed"] = [sequence.order for sequence, _ in result.failed]
        if borders:
            record["blocks"] = borders
        if inner:
            record["inner"] = inner
        if result.moves:
            record["beams"] = [
                [group.members[0].order, [[move.parent, self._stand_in(group, at)] for at, move in enumerate(moves)]]
                for group, moves in result.moves
            ]
        self._write(record)

    def flushed(self) -> None:
        """The prefix cache was emptied."""
        self._write({"f": 1})

    def broke(self) -> None:
        """The steps in flight are lost and the cache is emptied; the ends of their sequences come before."""
        self._write({"x": 1})

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what was still in the buffer
            self._give_up(error)

    def _stand_in(self, group: ForkGroup, beam: int) -> int:
        """For a beam's new token: equal only where two beams go on equally, which those of one parent never do."""
        one = group.live[beam]
        if one.num_known % self._block_size:
            return beam
        return int(self._block_hashes(one.tokens[: one.num_known])[-1])

    def _hash_up_to(self, sequence: Sequence, end: int) -> int:
        return int(self._block_hashes(sequence.tokens[:end])[-1])

    def _hide(self, name: str | bytes) -> str:
        data = name.encode() if isinstance(name, str) else name
        return hashlib.blake2b(data, key=self._key, digest_size=8).hexdigest()

    def _block_hashes(self, tokens: np.ndarray) -> np.ndarray:
        """i32[full blocks]: of all tokens up to each block's end."""
        count = len(tokens) // self._block_size * self._block_size
        sums = np.cumsum((tokens[:count].astype(np.uint64) + np.uint64(1)) * self._factors[:count], dtype=np.uint64)
        ends = sums[self._block_size - 1 :: self._block_size]
        mixed = (ends ^ (ends >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(33)).astype(np.int32)

    def _write(self, record: dict[str, Any]) -> None:
        if self._gave_up:
            return
        try:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._num_lines += 1
            if self._num_lines % LINES_PER_FLUSH == 0:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk ends the log, not the steps."""
        if not self._gave_up:
            log.error("scheduler.step_log = %r: %s; nothing more is written to it", str(self._path), error.strerror)
        self._gave_up = True


class PlanEncoder:
    """A plan as a short record: who joined and left the rows of one token since the last plan, chunks, a checksum."""

    def __init__(self):
        self._singles: set[int] = set()

    def encode(self, plan: StepPlan | None, scheduler: Scheduler) -> dict[str, Any] | None:
        """None for a turn in which nothing could be planned."""
        if plan is None:
            return None
        orders = [sequence.order for sequence in plan.sequences]
        singles = set(orders[: plan.num_decodes])
        record: dict[str, Any] = {"step": plan.step_id}
        if joined := sorted(singles - self._singles):
            record["join"] = joined
        if left := sorted(self._singles - singles):
            record["leave"] = left
        self._singles = singles
        rows = range(plan.num_decodes, plan.num_rows)
        if rows:
            record["chunks"] = [[orders[r], int(plan.first_positions[r]), int(plan.num_scheduled[r])] for r in rows]
        if plan.admitted:
            record["admit"] = [[sequence.order, sequence.num_cached] for sequence in plan.admitted]
        record |= {
            "bucket": plan.bucket,
            "free": scheduler.blocks.num_available_blocks,
            "preempted": scheduler.num_preemptions,
        }
        if plan.saves or plan.loads:
            record["swap"] = [len(plan.saves), len(plan.loads)]
        arrays = (plan.slots, plan.epochs, plan.num_scheduled, plan.first_positions, plan.output_index, plan.feeds)
        data = b"".join(np.ascontiguousarray(array, np.int32).tobytes() for array in arrays)
        record["sum"] = zlib.crc32(data)
        return record
