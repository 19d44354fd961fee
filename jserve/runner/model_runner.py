"""Runs plans on a device: one forward program and one sampler program a step, KV pools donated from step to step.

`launch` builds the arrays and starts the programs; `collect` waits for the oldest step and reads its small output.
Sampled ids stay on the device, by slot, and feed the next step without a visit to the host.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import jax
import numpy as np

from jserve.runner.batch import build
from jserve.runner.compile_plan import SCORED_ROWS, StepShape
from jserve.runner.forward import ServedParams
from jserve.runner.grammar_state import GrammarMasks, GrammarState
from jserve.runner.host_blocks import HostBlocks
from jserve.runner.pooling import Pooled, start_pooling
from jserve.runner.block_programs import NUM_SWAPPED
from jserve.runner.programs import DeviceState, ProgramSet
from jserve.runner.sampled_columns import SampledColumns
from jserve.runner.sampling_rows import SamplingRows
from jserve.sampling.sampler import SamplerVariant
from jserve.scheduler.plan import PromptScores, StepOutput, StepPlan
from jserve.scheduler.sequence import Sequence


@dataclass(frozen=True)
class _Scored:
    """Which prompt positions one scorer call scores: (row, first target position, count), end to end."""

    pieces: list[tuple[int, int, int]]
    packed: jax.Array  # i32[SCORED_ROWS, columns]


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    launched: float
    sampled: jax.Array | None  # i32[R, columns]
    variant: SamplerVariant | None
    masks: GrammarMasks
    beams: jax.Array | None  # i32[at least plan.beams, 2 * NUM_CANDIDATES]
    scored: list[_Scored]
    pooled: Pooled | None

    def sampled_id(self, slot: int, epoch: int) -> int:
        """The id that a slot's occupant samples in this step; waits for it."""
        rows = self.plan.sampling_rows
        [at] = np.flatnonzero((self.plan.slots[rows] == slot) & (self.plan.epochs[rows] == epoch))
        return int(np.asarray(self.sampled)[at, 0])


class ModelRunner:
    """Owns the device state: parameters, KV pools, the last sampled id of each slot.

    Args:
      tables: block tables by slot of each layer group, i32[num_slots, max_blocks]; read at launch.
      jumps: tell which tokens the grammars force.
    """

    def __init__(
        self, programs: ProgramSet, params: ServedParams, tables: tuple[np.ndarray, ...], *, jumps: bool = True
    ):
        self._programs = programs
        self._params = params
        self._tables = tables
        self._sampling = SamplingRows(programs.num_slots, programs.vocab_size)
        self._grammars = GrammarState(programs.num_slots, programs.vocab_size, jumps)
        self._in_flight: deque[_InFlight] = deque()
        self._last_collected = 0.0
        self._host = programs.blocks.host_blocks()
        self.swap_block_s = 0.0
        """Seconds that a block takes to or from host memory; measured by warm_up."""
        self.reset()

    @property
    def host_blocks(self) -> HostBlocks | None:
        """KV in host memory, if there is any."""
        return self._host

    def reset(self) -> None:
        """Forgets launched steps and starts from empty pools."""
        self._in_flight.clear()
        if self._host is not None:
            self._host.forget()
        self._pools = None  # give the old ones back first: two do not fit
        self._take(self._programs.empty_state())

    def warm_up(self) -> None:
        """Runs every program once with nothing but padding, so that the first request meets no first-call cost."""
        state = DeviceState(self._pools, self._slot_tokens, self._no_sums, self._shaping_rows)
        self._take(self._programs.run_each_once(self._params, state))
        jax.block_until_ready(self._pools)
        if self._host is not None:
            for _ in range(2):  # the second time counts
                began = time.perf_counter()
                self._programs.blocks.save(self._pools, self._host, 0, [(0, 0, 0)] * NUM_SWAPPED)
                self._pools = self._programs.blocks.load(self._pools, self._host, [(0, 0, 0)] * NUM_SWAPPED)
                jax.block_until_ready(self._pools)
                self.swap_block_s = (time.perf_counter() - began) / (2 * NUM_SWAPPED)

    def _take(self, state: DeviceState) -> None:
        self._pools, self._slot_tokens = state.pools, state.slot_tokens
        self._no_sums, self._shaping_rows = state.no_sums, state.shaping_rows

    def launch(self, plan: StepPlan) -> dict[int, list[int]]:
        """Starts a step; returns what is forced (StepOutput.forced).  Takes over the pools: whatever read them before is
        done or queued ahead of it."""
        programs = self._programs
        launched = time.perf_counter()
        for sequence in plan.admitted:
            self._enter(sequence)
        if plan.saves:
            programs.blocks.save(self._pools, self._host, plan.step_id, plan.saves)
        if plan.copies:
            self._pools = programs.blocks.copy(self._pools, plan.copies)
        if plan.loads:
            self._pools = programs.blocks.load(self._pools, self._host, plan.loads)
        if plan.poisoned:
            self._pools = programs.blocks.poison(self._pools, plan.poisoned)
        shape = programs.plan.step_shape(plan.bucket, plan.decode_only)
        packed = build(plan, programs.input_layout(shape), self._tables)
        hidden, sample_hidden, self._pools = programs.forward(
            shape, self._params, self._pools, self._slot_tokens, packed
        )
        sampled = variant = beams = None
        masks = GrammarMasks()
        if len(plan.sampling_rows):
            variant = self._sampling.variant(plan.slots[plan.sampling_rows])
            sampled, beams, masks = self._sample(plan, variant, sample_hidden)
        scored, pooled = [], None
        if self._sampling.reads_prompt(plan.slots):  # few steps do, and finding out row by row is work on the host
            scored = self._score_prompts(plan, shape, hidden)
            pooled = start_pooling(
                plan, self._no_sums, lambda sums, packed: programs.pool(shape, sums, hidden, packed)
            )
        self._in_flight.append(_InFlight(plan, launched, sampled, variant, masks, beams, scored, pooled))
        return masks.forced

    def save_now(self, saves: list[tuple[int, int, int]]) -> None:
        """Copies blocks (group, block, host block) to host memory, and waits for them."""
        if saves:
            self._programs.blocks.save(self._pools, self._host, 0, saves)
            self._host.settle()

    def collect(self) -> StepOutput:
        """Waits for the oldest launched step."""
        step = self._in_flight.popleft()
        output = StepOutput(step.plan.step_id, np.zeros(0, np.int32))
        if step.sampled is not None:
            columns = SampledColumns(np.asarray(step.sampled)[: len(step.plan.sampling_rows)])
            output.token_ids = columns.token_ids
            output.logprobs = columns.logprobs
            output.is_sound = columns.is_sound
            output.errors = step.masks.errors
            output.forced = step.masks.forced
            if step.variant.logprobs:
                output.ranks, output.top_ids, output.top_logprobs = columns.ranks, columns.top_ids, columns.top_logprobs
        elif step.beams is not None:
            output.token_ids = np.zeros(len(step.plan.sampling_rows), np.int32)
        else:
            jax.block_until_ready(self._pools)
        if step.beams is not None:
            output.beam_ids, logprobs = np.split(np.asarray(step.beams)[: len(step.plan.beams)], 2, axis=1)
            output.beam_logprobs = np.ascontiguousarray(logprobs).view(np.float32)
        if self._host is not None:
            self._host.settle(step.plan.step_id)
        output.prompt_scores = [piece for scored in step.scored for piece in _read_scores(scored)]
        output.pooled = None if step.pooled is None else step.pooled.read()
        now = time.perf_counter()
        output.device_seconds = now - max(step.launched, self._last_collected)
        self._last_collected = now
        return output

    def _enter(self, sequence: Sequence) -> None:
        self._sampling.enter(sequence)
        self._grammars.enter(sequence)
        dense_row = self._sampling.shaping.enter(sequence)
        if dense_row is not None:
            self._shaping_rows = self._programs.shaping.set_row(self._shaping_rows, sequence.slot, dense_row)

    def _sample(
        self, plan: StepPlan, variant: SamplerVariant, sample_hidden: jax.Array
    ) -> tuple[jax.Array | None, jax.Array | None, GrammarMasks]:
        """Starts head and sampler of a step; the sampler's packed output, that for beams, and the grammars' masks."""
        programs, rows = self._programs, plan.sampling_rows
        logits = programs.logits(len(rows), self._params, sample_hidden)
        beams = programs.beam_candidates(logits, plan.beams) if len(plan.beams) else None
        if len(plan.beams) == len(rows):
            return None, beams, GrammarMasks()
        packed = self._sampling.build(plan, len(logits))
        shaping = shaped = None
        masks = GrammarMasks()
        if self._sampling.shaping.is_shaped(plan.slots[rows]):
            shaping = self._sampling.shaping.build(plan, len(logits))
            masks = self._grammars.masks(  # while forward pass and head run
                plan, len(logits), lambda row: self._in_flight[-1].sampled_id(plan.slots[row], plan.epochs[row])
            )
            shaped = programs.shaping.shape(logits, self._shaping_rows, self._slot_tokens, shaping, masks.bits)
        self._slot_tokens, sampled = programs.sample(variant, logits, self._slot_tokens, packed, shaped)
        if shaping is not None:
            self._shaping_rows = programs.shaping.count(self._shaping_rows, self._slot_tokens, shaping)
        return sampled, beams, masks

    def _score_prompts(self, plan: StepPlan, shape: StepShape, hidden: jax.Array) -> list[_Scored]:
        """Starts scoring the prompt tokens of rows that asked for prompt_logprobs, SCORED_ROWS positions a call."""
        flat, targets, pieces = [], [], []
        offset = 0
        for row, sequence in enumerate(plan.sequences):
            first, count = int(plan.first_positions[row]), int(plan.num_scheduled[row])
            if sequence.sampling.prompt_logprobs is not None and first + 1 < sequence.num_prompt:
                count_scored = min(first + count, sequence.num_prompt - 1) - first  # position p scores token p + 1
                flat.extend(range(offset, offset + count_scored))
                targets.extend(sequence.tokens[first + 1 : first + 1 + count_scored])
                pieces.extend((row, first + 1 + i) for i in range(count_scored))
            offset += count
        scored = []
        for at in range(0, len(flat), SCORED_ROWS):
            packed = np.zeros((2, SCORED_ROWS), np.int32)
            chunk = slice(at, min(at + SCORED_ROWS, len(flat)))
            packed[0, : chunk.stop - at], packed[1, : chunk.stop - at] = flat[chunk], targets[chunk]
            out = self._programs.score(shape, self._params, hidden, packed)
            scored.append(_Scored(_runs(pieces[chunk]), out))
        return scored


def _runs(positions: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(row, position) pairs as runs of consecutive positions: (row, first, count)."""
    runs: list[tuple[int, int, int]] = []
    for row, position in positions:
        if runs and runs[-1][0] == row and runs[-1][1] + runs[-1][2] == position:
            runs[-1] = (row, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((row, position, 1))
    return runs


def _read_scores(scored: _Scored) -> list[PromptScores]:
    columns = SampledColumns(np.asarray(scored.packed))
    pieces, at = [], 0
    for row, first, count in scored.pieces:
        part = slice(at, at + count)
        pieces.append(
            PromptScores(
                row, first, columns.logprobs[part], columns.ranks[part], columns.top_ids[part], columns.top_logprobs[part]
            )
        )
        at += count
    return pieces
