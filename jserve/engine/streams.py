"""Turns step results into what clients see: text, log-probabilities, finish reasons, usage.

Runs on a thread of its own, so that detokenising never delays a step.  It is the one place that ends a request towards
its client: the first reason wins, whatever arrives later for that output is dropped.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jserve.engine.channel import Channel, deliver
from jserve.engine.embedding import PromptPool
from jserve.engine.outputs import StepResult
from jserve.metrics import Histograms, RequestCounts
from jserve.request import (
    Code,
    FinishReason,
    GenerateUpdate,
    OutputDelta,
    PositionLogprobs,
    RequestError,
    RequestMetrics,
    TokenLogprob,
    Usage,
)
from jserve.scheduler import Sequence
from jserve.scheduler.plan import PooledStates, PromptScores
from jserve.tokenizer import Detokenizer, TextStream, Tokenizer

log = logging.getLogger(__name__)

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


@dataclass
class _Output:
    """One output (index) of a request."""

    text: TextStream
    num_tokens: int = 0
    last_token: float | None = None
    cumulative_logprob: float | None = 0.0
    """None: not every token was sampled."""
    finished: bool = False


@dataclass(eq=False)
class RequestStream:
    """State of one request on the output thread; every sequence of the request carries it as its context."""

    request_id: str
    sequences: list[Sequence]
    channel: Channel
    tokenizer: Tokenizer
    outputs: list[_Output] = field(default_factory=list)
    prompt_scores: list[PositionLogprobs | None] | None = None
    prompt_scores_sent: bool = False
    pool: PromptPool | None = None
    held: dict[int, OutputDelta] = field(default_factory=dict)
    """With best_of > n: the outputs so far, of which the best are sent at the end."""
    first_token: float | None = None
    last_token: float | None = None
    done: bool = False
    abort_asked: bool = False

    def __post_init__(self):
        sampling = self.sequences[0].sampling
        for sequence in self.sequences:
            sequence.context = self
        for _ in range(sampling.n if sampling.beam_width > 1 else sampling.best_of):
            detokenizer = Detokenizer(self.tokenizer, sampling.skip_special_tokens)
            self.outputs.append(
                _Output(
                    TextStream(
                        detokenizer,
                        sampling.stop,
                        sampling.include_stop_str_in_output,
                        sampling.min_tokens,
                    )
                )
            )
        if sampling.prompt_logprobs is not None:
            self.prompt_scores = [None] * self.sequences[0].num_prompt
        if sampling.pooling is not None:
            self.pool = PromptPool(sampling.pooling, self.sequences[0].num_prompt)

    @property
    def ranks(self) -> bool:
        """Only the best outputs are sent, once all have ended."""
        sampling = self.sequences[0].sampling
        return sampling.best_of > sampling.n and sampling.beam_width == 1


class OutputThread:
    """Reads StepResults in order and delivers updates."""

    def __init__(
        self,
        finish_sequence: Callable[[Sequence, FinishReason], None],
        counts: RequestCounts,
        histograms: Histograms | None = None,
    ):
        """`finish_sequence` tells the engine that a stop string ended a sequence."""
        self._finish_sequence = finish_sequence
        self._counts = counts
        self._histograms = histograms
        self._results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jserve-outputs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, result: StepResult) -> None:
        self._results.put(result)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Processes what was put and ends the thread."""
        self._results.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (result := self._results.get()) is not None:
            deliver(self.process(result))

    def process(self, result: StepResult) -> list[tuple[Channel, GenerateUpdate | RequestError]]:
        """The updates that a step's result makes, in order."""
        updates: dict[RequestStream, GenerateUpdate] = {}
        errors: list[tuple[Channel, RequestError]] = []

        def guarded(stream: RequestStream, work: Callable, *arguments) -> None:
            """Runs `work` for a stream that is not done; a bug there ends that one request."""
            if stream.done:
                return
            try:
                work(stream, self._update_of(updates, stream), *arguments)
            except Exception:
                log.exception("request %s: making its output failed", stream.request_id)
                errors.append((stream.channel, RequestError(Code.INTERNAL, "making the output failed; see the log")))
                self._fail(stream)
                updates.pop(stream, None)

        for sequence, scores in result.prompt_scores:
            guarded(sequence.context, self._add_prompt_scores, sequence, scores)
        for sequence, states in result.pooled:
            guarded(sequence.context, self._add_pooled, states)
        for sequence in result.searches:
            guarded(sequence.context, self._end_search, sequence, result.time)
        ended = dict(result.ended)
        for sequence, token_id, row in zip(result.sequences, result.token_ids, result.rows):
            reason, forced = ended.pop(sequence, None), result.forced.get(sequence)
            last = reason if forced is None else None
            guarded(sequence.context, self._add_token, sequence, token_id, row, result, last)
            if forced is not None:
                guarded(sequence.context, self._add_forced, sequence, forced, reason)
        for sequence, reason in ended.items():
            guarded(sequence.context, self._end, sequence, reason)
        for sequence, error in result.failed:
            stream = sequence.context
            if not stream.done:
                errors.append((stream.channel, error))
                self._fail(stream)
                updates.pop(stream, None)
        return [(stream.channel, update) for stream, update in updates.items() if _says_something(update)] + errors

    # -- pieces of process()

    def _update_of(self, updates: dict, stream: RequestStream) -> GenerateUpdate:
        if stream not in updates:
            updates[stream] = GenerateUpdate(stream.request_id)
        return updates[stream]

    def _add_prompt_scores(
        self, stream: RequestStream, update: GenerateUpdate, sequence: Sequence, scores: PromptScores
    ) -> None:
        if stream.prompt_scores_sent:
            return  # recomputed after a preemption
        k = sequence.sampling.prompt_logprobs
        for i in range(len(scores.logprobs)):
            position = scores.first + i
            stream.prompt_scores[position] = position_logprobs(
                stream.tokenizer, int(sequence.tokens[position]), scores.logprobs[i], scores.ranks[i],
                scores.top_ids[i, :k], scores.top_logprobs[i, :k],
            )

    def _add_pooled(self, stream: RequestStream, update: GenerateUpdate, states: PooledStates) -> None:
        stream.pool.add(states)

    def _add_token(
        self,
        stream: RequestStream,
        update: GenerateUpdate,
        sequence: Sequence,
        token_id: int,
        row: int,
        result: StepResult,
        reason: FinishReason | None,
    ) -> None:
        output = stream.outputs[sequence.index]
        if output.finished:
            return
        now, step, sampling = result.time, result.output, sequence.sampling
        self._observe_token(stream, output, now)
        self._send_prompt_scores(stream, update)  # complete with the step that samples the first token
        delta = self._delta(stream, update, sequence.index)
        output.num_tokens += 1
        if output.cumulative_logprob is not None and step.logprobs is not None:
            output.cumulative_logprob += float(step.logprobs[row])
        delta.token_ids.append(token_id)
        if sampling.logprobs is not None:
            k = sampling.logprobs
            entry = position_logprobs(
                stream.tokenizer, token_id, step.logprobs[row], step.ranks[row],
                step.top_ids[row, :k], step.top_logprobs[row, :k],
            )
            delta.logprobs = (delta.logprobs or []) + [entry]
        self._add_text(stream, update, sequence, token_id, reason)

    def _add_forced(
        self,
        stream: RequestStream,
        update: GenerateUpdate,
        sequence: Sequence,
        token_ids: list[int],
        reason: FinishReason | None,
    ) -> None:
        """Tokens that came with the sampled one before them; how probable they were nobody knows."""
        output = stream.outputs[sequence.index]
        if output.finished:
            return
        output.cumulative_logprob = None
        output.num_tokens += len(token_ids)
        self._delta(stream, update, sequence.index).token_ids.extend(token_ids)
        for token_id in token_ids[:-1]:
            self._add_text(stream, update, sequence, token_id, None)
        self._add_text(stream, update, sequence, token_ids[-1], reason)

    def _add_text(
        self,
        stream: RequestStream,
        update: GenerateUpdate,
        sequence: Sequence,
        token_id: int,
        reason: FinishReason | None,
    ) -> None:
        """The token's text, and the end of the output where it ends with it."""
        output, delta = stream.outputs[sequence.index], self._delta(stream, update, sequence.index)
        if reason is FinishReason.STOP:
            delta.text += output.text.push([token_id], ended=True).text + output.text.finish()
            self._finish(stream, update, sequence.index, reason, sequence.matched_stop)
            return
        piece = output.text.push([token_id])
        delta.text += piece.text
        if piece.matched_stop is not None:
            self._finish(stream, update, sequence.index, FinishReason.STOP, piece.matched_stop)
            self._finish_sequence(sequence, FinishReason.STOP)
        elif reason is not None:
            delta.text += output.text.finish()
            self._finish(stream, update, sequence.index, reason)

    def _end(self, stream: RequestStream, update: GenerateUpdate, sequence: Sequence, reason: FinishReason) -> None:
        """Ends an output whose last token came earlier: abort, outgrown pool, prompt only."""
        if sequence.index >= len(stream.outputs):
            return  # one of more beams than outputs
        output = stream.outputs[sequence.index]
        if not output.finished:
            self._delta(stream, update, sequence.index).text += output.text.finish()
            self._finish(stream, update, sequence.index, reason)

    def _end_search(self, stream: RequestStream, update: GenerateUpdate, sequence: Sequence, now: float) -> None:
        """Sends the best beams, each whole."""
        best = sequence.group.search.best()
        del stream.outputs[max(1, len(best)) :]  # a vocabulary of fewer tokens than outputs
        self._observe_token(stream, stream.outputs[0], now)
        self._send_prompt_scores(stream, update)
        for index, hypothesis in enumerate(best):
            output, tokens = stream.outputs[index], hypothesis.last.path()
            delta = self._delta(stream, update, index)
            delta.token_ids = [token.token_id for token in tokens]
            output.num_tokens, output.cumulative_logprob = len(tokens), hypothesis.logprob
            if sequence.sampling.logprobs is not None:
                delta.logprobs = [
                    position_logprobs(
                        stream.tokenizer, token.token_id, token.logprob, token.rank, token.top_ids, token.top_logprobs
                    )
                    for token in tokens
                ]
            by_id = hypothesis.reason is FinishReason.STOP and not isinstance(hypothesis.matched_stop, str)
            delta.text = output.text.push(delta.token_ids, ended=by_id).text + output.text.finish()
            self._finish(stream, update, index, hypothesis.reason, hypothesis.matched_stop)
        if not best:
            self._finish(stream, update, 0, FinishReason.LENGTH)

    def _finish(
        self,
        stream: RequestStream,
        update: GenerateUpdate,
        index: int,
        reason: FinishReason,
        matched_stop: int | str | None = None,
    ) -> None:
        output = stream.outputs[index]
        output.finished = True
        delta = self._delta(stream, update, index)
        delta.finish_reason, delta.matched_stop = reason, matched_stop
        delta.cumulative_logprob = output.cumulative_logprob
        if all(o.finished for o in stream.outputs):
            if stream.pool is not None and reason is not FinishReason.ABORTED:
                update.embedding = stream.pool.mean()
            stream.done = True
            update.outputs += _best(stream)
            self._count_end(stream, reason)
            update.usage = self._usage(stream)
            update.metrics = _metrics(stream)
            self._send_prompt_scores(stream, update)

    def _delta(self, stream: RequestStream, update: GenerateUpdate, index: int) -> OutputDelta:
        if stream.ranks:
            return stream.held.setdefault(index, OutputDelta(index))
        for delta in update.outputs:
            if delta.index == index:
                return delta
        delta = OutputDelta(index)
        update.outputs.append(delta)
        return delta

    def _send_prompt_scores(self, stream: RequestStream, update: GenerateUpdate) -> None:
        if stream.prompt_scores is not None and not stream.prompt_scores_sent:
            update.prompt_logprobs = stream.prompt_scores
            stream.prompt_scores_sent = True

    def _usage(self, stream: RequestStream) -> Usage:
        first = stream.sequences[0]
        return Usage(first.num_prompt, sum(o.num_tokens for o in stream.outputs), first.num_cached or 0)

    def _observe_token(self, stream: RequestStream, output: _Output, now: float) -> None:
        if self._histograms is not None:
            if stream.first_token is None:
                self._histograms.time_to_first_token.observe(now - stream.sequences[0].arrival)
            elif output.last_token is not None:
                self._histograms.inter_token_latency.observe(now - output.last_token)
        stream.first_token = stream.first_token or now
        stream.last_token = output.last_token = now

    def _count_end(self, stream: RequestStream, reason: FinishReason) -> None:
        counts, usage = self._counts, self._usage(stream)
        counts.generation_tokens += usage.completion_tokens
        counts.cached_tokens += usage.cached_tokens
        match reason:
            case FinishReason.STOP:
                counts.stopped += 1
            case FinishReason.LENGTH:
                counts.length += 1
            case FinishReason.ABORTED:
                counts.aborted += 1
        self._observe_end(stream)

    def _observe_end(self, stream: RequestStream) -> None:
        first, histograms = stream.sequences[0], self._histograms
        if histograms is None or first.first_scheduled is None:
            return
        histograms.queue_time.observe(max(0.0, first.first_scheduled - first.arrival))
        if stream.first_token is not None:
            histograms.prefill_time.observe(max(0.0, stream.first_token - first.first_scheduled))
            histograms.decode_time.observe(stream.last_token - stream.first_token)
            histograms.e2e_latency.observe(stream.last_token - first.arrival)

    def _fail(self, stream: RequestStream) -> None:
        stream.done = True
        self._counts.failed += 1
        for sequence in stream.sequences:
            self._finish_sequence(sequence, FinishReason.ABORTED)


def position_logprobs(
    tokenizer: Tokenizer, token_id: int, logprob: float, rank: int, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> PositionLogprobs:
    """Logprobs at one position; `top_ids` are the k most probable, best first, and the chosen one joins if missing."""
    chosen = _token_logprob(tokenizer, token_id, logprob, int(rank))
    top = [
        _token_logprob(tokenizer, int(top_id), top_logprob, at + 1)
        for at, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs))
    ]
    if all(entry.token_id != token_id for entry in top):
        top.append(chosen)
    return PositionLogprobs(chosen, tuple(top))


def _best(stream: RequestStream) -> list[OutputDelta]:
    """With best_of > n: the n outputs of the highest mean logprob, best first, numbered anew."""
    if not stream.ranks:
        return []

    def mean_logprob(index: int) -> float:
        output = stream.outputs[index]
        return output.cumulative_logprob / output.num_tokens if output.num_tokens else -math.inf

    ranked = sorted(stream.held, key=lambda index: (-mean_logprob(index), index))
    best = [stream.held[index] for index in ranked[: stream.sequences[0].sampling.n]]
    for index, delta in enumerate(best):
        delta.index = index
    return best


def _token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> TokenLogprob:
    return TokenLogprob(
        token_id, max(float(logprob), LOWEST_LOGPROB), rank, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
    )


def _metrics(stream: RequestStream) -> RequestMetrics:
    first = stream.sequences[0]
    queued = None if first.first_scheduled is None else first.first_scheduled - first.arrival
    return RequestMetrics(
        arrival=first.arrival,
        first_scheduled=first.first_scheduled,
        first_token=stream.first_token,
        last_token=stream.last_token,
        queue_s=queued,
        num_preemptions=sum(s.num_preemptions for s in stream.sequences),
    )


def _says_something(update: GenerateUpdate) -> bool:
    return bool(update.usage or update.prompt_logprobs) or any(
        delta.text or delta.token_ids or delta.finish_reason for delta in update.outputs
    )
