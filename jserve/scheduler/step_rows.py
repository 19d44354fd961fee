"""From who decodes and who gets a chunk to the rows of a step: filled to a bucket, singles first, one array a column."""

from __future__ import annotations

import numpy as np

from jserve.scheduler.buckets import bucket_for, num_tokens_to_run
from jserve.scheduler.limits import SchedulerLimits
from jserve.scheduler.plan import StepPlan
from jserve.scheduler.slots import Slots


def fill_bucket(limits: SchedulerLimits, num_decodes: int, chunks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Shortens the last chunks, of (slot, tokens), where the step would otherwise be padded more than a second one costs."""
    wanted = num_decodes + sum(grant for _, grant in chunks)
    if not chunks or wanted == num_decodes + len(chunks):
        return chunks
    surplus = wanted - num_tokens_to_run(limits.token_buckets, wanted, num_decodes + 1, limits.step_cost_tokens)
    while surplus > 0:
        slot, grant = chunks.pop()
        if grant > surplus:
            chunks.append((slot, grant - surplus))
        surplus -= grant
    return chunks


def make_plan(
    slots: Slots, limits: SchedulerLimits, decodes: np.ndarray, chunks: list[tuple[int, int]], **others
) -> StepPlan:
    """The plan of a step; from here on the slots count its tokens as computed and what it samples as known.

    Args:
      decodes: slots with one token each.
      chunks: (slot, tokens) of the others.
      others: the fields of StepPlan that are no rows.
    """
    chunks.sort(key=lambda chunk: chunk[1] > 1)  # stable: rows of one token join the decodes
    num_decodes = len(decodes) + sum(grant == 1 for _, grant in chunks)
    rows = np.concatenate([decodes, np.array([slot for slot, _ in chunks], np.int32)])
    granted = np.ones(len(rows), np.int32)
    granted[len(decodes):] = [grant for _, grant in chunks]
    first = slots.num_computed[rows]
    end = first + granted
    reaches_end = end == slots.num_tokens[rows]
    samples = reaches_end & ~slots.prompt_only[rows]
    feeds = reaches_end & slots.fed[rows] & (granted == 1)
    output_index = np.where(samples, slots.num_tokens[rows] - slots.num_prompt[rows], 0)
    slots.num_computed[rows] = end
    beams = slots.is_beam[rows]
    sampled = rows[samples & ~beams]
    slots.num_tokens[sampled] += 1
    slots.fed[sampled] = True
    num_tokens = int(granted.sum())
    buckets = limits.sequence_buckets if num_decodes == len(rows) else limits.token_buckets
    return StepPlan(
        sequences=[slots.owner[slot] for slot in rows],
        slots=rows,
        epochs=slots.epoch[rows],
        num_scheduled=granted,
        first_positions=first,
        samples=samples,
        sampling_rows=np.flatnonzero(samples),
        beams=np.flatnonzero(beams[samples]),
        feeds=feeds,
        output_index=output_index,
        num_decodes=num_decodes,
        num_tokens=num_tokens,
        bucket=bucket_for(buckets, num_tokens),
        has_prompt_only=bool(slots.prompt_only[rows].any()),
        **others,
    )
