"""One sequence on the host: its known tokens and where it stands.

A sequence has a token list (prompt + output) and a number of computed tokens; a step grants it some more.  Prefill
chunk, decode, prefix hit and resume after preemption are all the same grant.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from jserve.request import FinishReason, Sampling

if TYPE_CHECKING:
    from jserve.sampling.beam_search import BeamSearch
    from jserve.scheduler.fork_group import ForkGroup
    from jserve.scheduler.seating import Away


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """State of one output of one request.  Only the engine thread writes to it.

    Invariant: `len(prompt) <= num_known <= limit`; `slot` is set exactly while RUNNING.
    """

    __slots__ = (
        "request_id", "index", "sampling", "priority", "arrival", "order", "salt", "use_prefix_cache",
        "num_prompt", "tokens", "num_known", "limit", "slot", "state", "finish_reason", "matched_stop",
        "num_cached", "first_scheduled", "num_preemptions", "stop_ids", "prompt_only", "context", "awaits_token",
        "tenant", "rank", "queued_tokens", "ticket", "group", "away", "search", "has_fetched",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: np.ndarray,  # i32[num_prompt]
        sampling: Sampling,
        *,
        index: int = 0,
        priority: int = 0,
        arrival: float = 0.0,
        salt: bytes = b"",
        use_prefix_cache: bool = True,
        context: object = None,
        tenant: str = "",
        search: BeamSearch | None = None,
    ):
        self.request_id = request_id
        self.index = index
        self.sampling = sampling
        self.priority = priority
        self.arrival = arrival
        self.tenant = tenant
        self.order = 0  # set by the scheduler on arrival: decides between equal ranks
        self.rank = 0.0  # set by the policy when it starts to wait: the lowest goes first
        self.queued_tokens = 0  # known tokens when it started to wait
        self.ticket = 0  # of its one valid entry in the queue
        self.group: ForkGroup | None = None  # set by the scheduler where the request has several sequences
        self.search = search  # of the first beam of a request
        self.away: Away | None = None  # its KV is in host memory
        self.salt = salt
        self.use_prefix_cache = use_prefix_cache
        self.context = context  # the front end's own record; the engine never looks inside
        self.num_prompt = len(prompt_token_ids)
        self.prompt_only = sampling.max_tokens == 0
        self.limit = self.num_prompt + max(1, sampling.max_tokens)
        self.tokens = np.empty(self.limit, np.int32)
        self.tokens[: self.num_prompt] = prompt_token_ids
        self.num_known = self.num_prompt
        self.slot: int | None = None
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.matched_stop: int | None = None
        self.num_cached: int | None = None
        self.first_scheduled: float | None = None
        self.num_preemptions = 0
        self.has_fetched = False  # what lower tiers of the prefix cache know was brought back before it enters
        self.awaits_token = False  # preempted while a token was being sampled for it
        self.stop_ids = sampling.stop_token_ids | sampling.eos_token_ids

    @property
    def num_output(self) -> int:
        return self.num_known - self.num_prompt

    @property
    def finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    def append(self, token_id: int) -> FinishReason | None:
        """Adds a sampled token; says why the sequence ends with it, or None."""
        self.awaits_token = False
        self.tokens[self.num_known] = token_id
        self.num_known = num_known = self.num_known + 1
        if token_id in self.stop_ids and num_known - self.num_prompt > self.sampling.min_tokens:
            if token_id not in self.sampling.eos_token_ids:
                self.matched_stop = token_id
            return FinishReason.STOP
        return FinishReason.LENGTH if num_known >= self.limit else None
