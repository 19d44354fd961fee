"""The engine's front door: asyncio on this side, the engine thread and the output thread on the other.

Every front end (gRPC, the offline API, `batch`) comes through `generate`, so there is one validator and one path.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import numpy as np

from jserve.clock import stamp
from jserve.config import Config
from jserve.engine import request_log
from jserve.engine.channel import Channel, merge
from jserve.engine.info import Loads, ModelInfo
from jserve.engine.loop import EngineLoop
from jserve.engine.profile import Profiler
from jserve.engine.spans import spans_to
from jserve.engine.streams import OutputThread, RequestStream
from jserve.grammar import GrammarCompiler
from jserve.kv.block_keys import sequence_salt
from jserve.metrics import Histograms, LoadsCollector, RequestCounts
from jserve.request import Code, GenerateRequest, GenerateUpdate, Pooling, RequestError, Sampling, invalid
from jserve.sampling.beam_search import BeamSearch, stop_finder
from jserve.sampling.limits import ModelLimits
from jserve.sampling.validate import resolve, truncate_prompt, validate_request
from jserve.scheduler import Scheduler, Sequence
from jserve.tokenizer import ChatTemplateError, Detokenizer, PromptTooLong, TextStream, Tokenizer

LONG_TEXT = 4096
"""Characters from which tokenising goes to a thread, so that one long prompt does not hold up every other stream."""
RETRY_AFTER_S = 1.0


class AsyncEngine:
    """Serves one model.  Made by `jserve.engine.build`; safe to use from several event loops."""

    def __init__(
        self,
        *,
        info: ModelInfo,
        config: Config,
        limits: ModelLimits,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        loop: EngineLoop,
        outputs: OutputThread,
        counts: RequestCounts,
        histograms: Histograms,
        max_waiting: int,
        bytes_per_block: int,
        compiles_after_ready: Callable[[], int],
    ):
        self.info = info
        self.config = config
        """With every automatic value resolved."""
        self.limits = limits
        self.tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer, limits.eos_token_ids)
        self.counts = counts
        self.metrics_registry = histograms.registry
        histograms.registry.register(LoadsCollector(self.loads, info.name))
        self._scheduler = scheduler
        self._loop = loop
        self._outputs = outputs
        self._max_waiting = max_waiting
        self._bytes_per_block = bytes_per_block
        self._compiles_after_ready = compiles_after_ready
        self._profiler = Profiler(Path(config.compile.cache_dir) / "profiles", lambda: loop.totals.num_steps)
        self._spans = spans_to(config.server.otlp_endpoint, info.name)
        self._streams: dict[str, RequestStream | None] = {}
        self._state = "starting"

    # -- life

    def start(self) -> None:
        """Starts the threads; requests are served from here on."""
        self._outputs.start()
        self._loop.start()
        self._state = "ready"

    @property
    def state(self) -> str:
        """starting, ready, draining or stopped."""
        return self._state

    def begin_drain(self) -> None:
        """New requests are refused from now on; accepted ones go on."""
        if self._state == "ready":
            self._state = "draining"

    async def drain(self, timeout_s: float) -> bool:
        """Waits until every accepted request has ended, at most `timeout_s`; says whether all did."""
        self.begin_drain()
        deadline = time.monotonic() + timeout_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._streams

    async def close(self) -> None:
        """Aborts what still runs and ends the threads."""
        self._state = "stopped"
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        self._state = "stopped"
        self._profiler.close()
        if self._spans is not None:
            self._spans.close()
        self._loop.stop()
        self._outputs.stop()

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateUpdate]:
        """Streams a request's updates; closing the iterator aborts the request.

        Raises:
          RequestError: before the first update where the request is refused, later only for an INTERNAL failure.
        """
        began, update, failure = time.perf_counter(), None, None
        try:
            stream = await self._admit(request)
        except RequestError as refusal:
            self.counts.refused += 1
            request_log.refused(request.request_id, refusal)
            raise
        try:
            while True:
                update = await stream.channel.get()
                yield update
                if update.usage is not None:
                    return
        except RequestError as error:
            failure = error
            raise
        finally:
            self._streams.pop(stream.request_id, None)
            if not stream.done:
                self._loop.abort(stream.request_id)
            request_log.ended(stream.request_id, update, time.perf_counter() - began, failure)
            if self._spans is not None:
                self._spans.ended(stream.request_id, update, failure)

    async def generate_all(self, request: GenerateRequest) -> GenerateUpdate:
        """The whole answer as one update."""
        merged: GenerateUpdate | None = None
        async with aclosing(self.generate(request)) as updates:
            async for update in updates:
                if merged is None:
                    merged = update
                else:
                    merge(merged, update)
        return merged

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its stream ends with ABORTED.  False where no such request is running."""
        stream = self._streams.get(request_id)
        if stream is None or stream.done or stream.abort_asked:
            return False
        stream.abort_asked = True
        self._loop.abort(request_id)
        return True

    async def _admit(self, request: GenerateRequest) -> RequestStream:
        self._refuse_unless_ready()
        arrival = stamp()
        validate_request(request, self.limits)
        request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        if request_id in self._streams:
            raise RequestError(
                Code.ALREADY_EXISTS, f"request_id = {request_id!r}: a request of that id is running", field="request_id"
            )
        self._streams[request_id] = None
        try:
            prompt = truncate_prompt(request.sampling_params, await self._prompt_token_ids(request))
            sampling = resolve(request.sampling_params, self.limits, len(prompt), _prompt_field(request))
            if sampling.structured is not None:
                grammar = await asyncio.to_thread(self._grammars.compile, sampling.structured)
                sampling = dataclasses.replace(sampling, grammar=grammar)
            if request.pooling is not None:
                sampling = dataclasses.replace(sampling, pooling=request.pooling)
            self._refuse_unless_ready()
            if request.deadline is not None and request.deadline <= time.monotonic():
                raise RequestError(Code.DEADLINE_EXCEEDED, "the deadline had passed before the request could be queued")
            self._refuse_when_full()
            self._refuse_when_too_late(request, sampling, len(prompt))
            stream = self._make_stream(request, request_id, prompt, sampling, arrival)
        except BaseException:
            del self._streams[request_id]
            raise
        self._streams[request_id] = stream
        self.counts.accepted += 1
        self.counts.prompt_tokens += len(prompt)
        self._loop.submit(stream.sequences)
        return stream

    def _make_stream(
        self, request: GenerateRequest, request_id: str, prompt: list[int], sampling: Sampling, arrival: float
    ) -> RequestStream:
        search = self._beam_search(sampling) if sampling.beam_width > 1 else None
        sequences = [
            Sequence(
                request_id,
                np.asarray(prompt, np.int32),
                sampling,
                index=index,
                priority=request.priority or 0,
                arrival=arrival,
                salt=sequence_salt(tenant=request.tenant, cache_salt=request.cache_salt),
                use_prefix_cache=not request.bypass_prefix_cache and not _needs_whole_prompt(sampling),
                tenant=request.tenant or "",
                search=search if index == 0 else None,
            )
            for index in range(max(sampling.best_of, sampling.beam_width))
        ]
        return RequestStream(request_id, sequences, Channel(asyncio.get_running_loop()), self.tokenizer)

    def _beam_search(self, sampling: Sampling) -> BeamSearch:
        def stream() -> TextStream:
            detokenizer = Detokenizer(self.tokenizer, sampling.skip_special_tokens)
            return TextStream(detokenizer, sampling.stop, sampling.include_stop_str_in_output, sampling.min_tokens)

        return BeamSearch(sampling, stop_finder(stream) if sampling.stop else None)

    def _refuse_unless_ready(self) -> None:
        if self._state != "ready":
            raise RequestError(Code.UNAVAILABLE, f"the server is {self._state}", retry_after_s=RETRY_AFTER_S)

    def _refuse_when_full(self) -> None:
        waiting, live = self._scheduler.num_waiting, len(self._streams) - 1
        room = self._max_waiting + self._scheduler.limits.num_slots
        if live >= room or waiting > self._max_waiting or (waiting == self._max_waiting and waiting > 0):
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"the queue is full: {waiting} requests wait and scheduler.max_waiting is {self._max_waiting}",
                retry_after_s=RETRY_AFTER_S,
            )

    def _refuse_when_too_late(self, request: GenerateRequest, sampling: Sampling, num_prompt: int) -> None:
        """A deadline that passes before the tokens that the request is sure to have is not worth the work."""
        if request.deadline is None or not self.config.scheduler.deadline_admission:
            return
        first_token_s = self._scheduler.first_token_s(num_prompt)
        if first_token_s is None:
            return  # nothing has run yet: the speed is unknown
        needed_s = first_token_s + max(0, sampling.min_tokens - 1) * self._scheduler.step_time.decode_s
        left_s = request.deadline - time.monotonic()
        if needed_s > left_s:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"the first token is about {needed_s:.2f} s away, the deadline {left_s:.2f} s: the queue is too long",
                retry_after_s=max(RETRY_AFTER_S, needed_s - left_s),
            )

    async def _prompt_token_ids(self, request: GenerateRequest) -> list[int]:
        if request.prompt_token_ids is not None:
            return list(request.prompt_token_ids)
        # A text that is sure to exceed the context is refused in milliseconds, not tokenised for seconds.
        truncates = request.sampling_params.truncate_prompt_tokens is not None
        most = None if truncates else self.limits.context_length
        try:
            if request.prompt is not None:
                return await self._off_loop(
                    len(request.prompt), self.tokenizer.encode, request.prompt, add_special=True, max_tokens=most
                )
            size = sum(len(message.content) for message in request.messages)
            return await self._off_loop(
                size, self.tokenizer.encode_chat, request.messages, tools=request.tools, max_tokens=most
            )
        except PromptTooLong as error:
            raise invalid(_prompt_field(request), f"at least {error.at_least} tokens", f"exceeds the context of {most} tokens") from None
        except ChatTemplateError as error:
            raise RequestError(Code.INVALID_ARGUMENT, str(error), field=error.field) from None
        except ValueError as error:
            field = _prompt_field(request)
            raise invalid(field, getattr(request, field), str(error)) from None

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text, by default as `generate` would read it as a prompt."""
        return await self._off_loop(
            len(text), self.tokenizer.encode, text, add_special=add_special, parse_special=parse_special
        )

    async def _off_loop(self, size: int, function: Callable, *arguments, **named):
        """Runs a function of the tokenizer; in a thread where the text is long."""
        if size < LONG_TEXT:
            return function(*arguments, **named)
        return await asyncio.to_thread(function, *arguments, **named)

    # -- looking in and housekeeping

    def loads(self) -> Loads:
        blocks, totals, counts = self._scheduler.blocks, self._loop.totals, self.counts
        stats, tiers = blocks.stats, blocks.tier_stats
        num_running, num_waiting = self._loop.counts()
        return Loads(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_usage=blocks.num_used_blocks / blocks.num_total_blocks,
            num_total_blocks=blocks.num_total_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            # A difference of two counts that the engine thread changes one after the other.
            num_saved_blocks=max(0, blocks.num_saved_blocks),
            num_preemptions=self._scheduler.num_preemptions,
            num_swap_preemptions=self._scheduler.num_swap_preemptions,
            # Like num_saved_blocks: the scheduler counts what the tier has counted a moment before.
            swapped_out_bytes=max(0, self._scheduler.num_saved_blocks - tiers.num_host_saved_blocks)
            * self._bytes_per_block,
            swapped_in_bytes=max(0, self._scheduler.num_loaded_blocks - tiers.num_host_loaded_blocks)
            * self._bytes_per_block,
            host_tier_hit_tokens=tiers.num_host_hit_tokens,
            disk_tier_hit_tokens=tiers.num_disk_hit_tokens,
            num_host_cached_blocks=tiers.num_host_cached_blocks,
            host_tier_saved_bytes=tiers.num_host_saved_blocks * self._bytes_per_block,
            host_tier_loaded_bytes=tiers.num_host_loaded_blocks * self._bytes_per_block,
            disk_tier_saved_bytes=tiers.num_disk_saved_blocks * self._bytes_per_block,
            disk_tier_loaded_bytes=tiers.num_disk_loaded_blocks * self._bytes_per_block,
            preempted_tokens_lost=self._scheduler.num_preempted_tokens,
            num_steps=totals.num_steps,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=totals.generated_tokens,
            prefix_cache_queried_tokens=stats.num_queried_tokens,
            prefix_cache_hit_tokens=stats.num_hit_tokens,
            scheduled_tokens=totals.scheduled_tokens,
            padded_tokens=totals.padded_tokens,
            compiles_after_ready=self._compiles_after_ready(),
            requests_accepted=counts.accepted,
            requests_refused=counts.refused,
            requests_stopped=counts.stopped,
            requests_length=counts.length,
            requests_aborted=counts.aborted,
            requests_failed=counts.failed,
        )

    async def flush_cache(self) -> int:
        """Forgets every cached block that no sequence owns; returns how many."""
        return await asyncio.wrap_future(self._loop.call(self._scheduler.blocks.flush))

    async def start_profile(self, folder: str | None, num_steps: int | None) -> str:
        """Begins a jax.profiler trace of `num_steps` steps (None: until `stop_profile`); its folder.

        Raises:
          RequestError: FAILED_PRECONDITION where one runs, INVALID_ARGUMENT where the folder cannot be made.
        """
        return await asyncio.to_thread(self._profiler.start, folder, num_steps)

    async def stop_profile(self) -> str:
        """Writes the trace; its folder.  FAILED_PRECONDITION where none runs."""
        return await asyncio.to_thread(self._profiler.stop)

    async def check_integrity(self) -> list[str]:
        """Violated invariants of the KV bookkeeping, in words; empty when sound."""
        return await asyncio.wrap_future(self._loop.call(self._scheduler.blocks.check_integrity))


def _prompt_field(request: GenerateRequest) -> str:
    """Which of its fields holds the prompt."""
    return next(name for name in ("prompt", "prompt_token_ids", "messages") if getattr(request, name) is not None)


def _needs_whole_prompt(sampling: Sampling) -> bool:
    """Every prompt token must be computed for this request, also where the prefix cache knows some."""
    return sampling.prompt_logprobs is not None or sampling.pooling is Pooling.MEAN
