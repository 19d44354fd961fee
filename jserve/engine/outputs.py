"""Applies a step's output to its sequences: appends tokens, ends sequences, and says what happened.

Runs on the engine thread and does only what the next `schedule()` needs; text is made elsewhere (`engine.streams`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jserve.clock import stamp
from jserve.request import Code, FinishReason, RequestError
from jserve.sampling.beam_search import Candidates, Move
from jserve.scheduler import Scheduler, Sequence, StepPlan
from jserve.scheduler.fork_group import ForkGroup, search_of
from jserve.scheduler.plan import PooledStates, PromptScores, StepOutput
from jserve.scheduler.sequence import SequenceState

FINISHED = SequenceState.FINISHED


@dataclass
class StepResult:
    """What one step did to its sequences, in the order in which clients must hear of it."""

    time: float
    sequences: list[Sequence] = field(default_factory=list)
    """Sequences that got a token each."""
    token_ids: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Row of each of them in the output's logprob arrays."""
    forced: dict[Sequence, list[int]] = field(default_factory=dict)
    """Tokens that some of them got behind that one, without sampling."""
    output: StepOutput | None = None
    prompt_scores: list[tuple[Sequence, PromptScores]] = field(default_factory=list)
    pooled: list[tuple[Sequence, PooledStates]] = field(default_factory=list)
    moves: list[tuple[ForkGroup, list[Move]]] = field(default_factory=list)
    """Searches that went a step on, and the beams that they chose; none where a search ended."""
    searches: list[Sequence] = field(default_factory=list)
    """A beam of each search that has ended; its other beams are among the ended sequences too."""
    ended: list[tuple[Sequence, FinishReason]] = field(default_factory=list)
    failed: list[tuple[Sequence, RequestError]] = field(default_factory=list)


def _no_numbers() -> RequestError:
    return RequestError(Code.INTERNAL, "the model gave no numbers for this request")


def outgrown(sequences: list[Sequence]) -> StepResult:
    """Of sequences that the scheduler ended because the pool is too small for them."""
    result = StepResult(stamp())
    for sequence in sequences:
        if search_of(sequence) is None:
            result.ended.append((sequence, FinishReason.LENGTH))
        else:
            result.searches.append(sequence)
            result.ended += [(one, FinishReason.LENGTH) for one in sequence.group.members]
    return result


def apply(scheduler: Scheduler, plan: StepPlan, output: StepOutput) -> StepResult:
    """Appends what was sampled and ends what is finished.  Rows of sequences that ended meanwhile are dropped."""
    assert output.step_id == plan.step_id, f"output of step {output.step_id} for the plan of step {plan.step_id}"
    result = StepResult(stamp(), output=output)
    _append_tokens(plan, output, result)
    due = _report_beams(scheduler, plan, output, result) if len(plan.beams) else []
    for scores in output.prompt_scores or ():
        sequence = plan.sequences[scores.row]
        if not sequence.finished:
            result.prompt_scores.append((sequence, scores))
    for pooled in output.pooled or ():
        sequence = plan.sequences[pooled.row]
        is_at_end = pooled.first + pooled.count == sequence.num_prompt
        if sequence.finished or not (is_at_end or scheduler.is_current(plan, pooled.row)):
            continue  # preempted meanwhile: it goes on where the results on the host end
        if np.isfinite(pooled.total).all():
            result.pooled.append((sequence, pooled))
        else:
            result.failed.append((sequence, _no_numbers()))
    if plan.has_prompt_only:
        failed = {sequence for sequence, _ in result.failed}
        ends = plan.first_positions + plan.num_scheduled
        for sequence, end in zip(plan.sequences, ends):
            is_at_end = sequence.prompt_only and end == sequence.num_prompt
            if is_at_end and not sequence.finished and sequence not in failed:
                result.ended.append((sequence, FinishReason.LENGTH))
    # Before the blocks of ended sequences are released: their full blocks stay findable.
    scheduler.applied(plan, output.device_seconds)
    for group in due:
        moves = group.search.advance()
        result.moves.append((group, moves))
        if moves:
            scheduler.move_beams(group, moves)
        else:
            result.searches.append(group.members[0])
            result.ended += [(one, FinishReason.LENGTH) for one in group.members]
    for sequence, reason in result.ended:
        scheduler.finish(sequence, reason)
    for sequence, _ in result.failed:
        scheduler.finish(sequence, FinishReason.ABORTED)
    return result


def _append_tokens(plan: StepPlan, output: StepOutput, result: StepResult) -> None:
    """The step's tokens to their sequences; every row of a large batch comes through here, so it is kept lean."""
    sampled, token_ids = plan.sampled_sequences(), output.token_ids.tolist()
    rows = list(range(len(sampled)))
    broken = dict(output.errors or {})
    if output.is_sound is not None and not output.is_sound.all():
        for row in np.flatnonzero(~output.is_sound).tolist():
            broken.setdefault(row, _no_numbers())
    dropped = {row for row, sequence in enumerate(sampled) if sequence.state is FINISHED}
    dropped.update(plan.beams.tolist())
    forced = {sampled[row]: ids for row, ids in (output.forced or {}).items()}
    for row, error in broken.items():
        if row not in dropped:
            result.failed.append((sampled[row], error))
            dropped.add(row)
    if dropped:
        rows = [row for row in rows if row not in dropped]
        sampled, token_ids = [sampled[row] for row in rows], [token_ids[row] for row in rows]
    for sequence, token_id in zip(sampled, token_ids):
        reason = sequence.append(token_id)
        if reason is None and sequence in forced:
            reason = _append_forced(sequence, forced[sequence][1:], result)
        if reason is not None:
            result.ended.append((sequence, reason))
    result.sequences, result.token_ids, result.rows = sampled, token_ids, rows


def _append_forced(sequence: Sequence, token_ids: list[int], result: StepResult) -> FinishReason | None:
    """The tokens that must follow the sampled one; why the sequence ends with them, or None."""
    reason, appended = None, []
    for token_id in token_ids:
        appended.append(token_id)
        if (reason := sequence.append(token_id)) is not None:
            break
    if appended:
        result.forced[sequence] = appended
    return reason


def _report_beams(scheduler: Scheduler, plan: StepPlan, output: StepOutput, result: StepResult) -> list[ForkGroup]:
    """The candidates of beams to their searches; returns the groups of which all beams have been reported."""
    due = []
    for at, sampled in enumerate(plan.beams.tolist()):
        row = int(plan.sampling_rows[sampled])
        sequence = plan.sequences[row]
        sequence.awaits_token = False
        if sequence.finished or not scheduler.is_current(plan, row):
            continue  # preempted meanwhile: it will be computed again
        group, logprobs = sequence.group, output.beam_logprobs[at]
        if not np.isfinite(logprobs).all():
            error = _no_numbers()
            result.failed += [(one, error) for one in group.members]
            continue
        group.search.report(group.live.index(sequence), Candidates(output.beam_ids[at], logprobs))
        if group.search.is_due:
            due.append(group)
    failed = {one.group for one, _ in result.failed}
    return [group for group in due if group not in failed]


def fail(scheduler: Scheduler, sequences: list[Sequence], error: RequestError) -> StepResult:
    """Ends sequences whose step broke, so that only they suffer."""
    result = StepResult(stamp())
    for sequence in sequences:
        for one in [sequence] if search_of(sequence) is None else sequence.group.members:  # beams end together
            if not one.finished:
                scheduler.finish(one, FinishReason.ABORTED)
                result.failed.append((one, error))
    return result

