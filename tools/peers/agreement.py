"""Whether two engines chose the same tokens, and where not, how close the choice was."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass

from jserve.bench.report import RequestRecord
from jserve.request import GenerateRequest, SamplingParams
from jserve.server.async_client import AsyncClient

MAX_ASKED = 20
"""First differences whose margin is asked for."""
NUM_ALTERNATIVES = 20
FLOAT32_MARGIN = 0.05
"""Nats: what separates two choices by less may fall either way where both compute in float32; log-probabilities of
SmolLM2 differ by some 1e-4 between engines."""


@dataclass(frozen=True)
class Agreement:
    num_requests: int
    num_equal: int
    prefix_share: float
    """Tokens before the first difference among all."""
    margins: tuple[float, ...] = ()
    """By how many nats our model prefers its choice to theirs, at first differences; at least so many where theirs is
    not among its best."""


def compare(ours: Sequence[RequestRecord], theirs: Sequence[RequestRecord]) -> Agreement | None:
    """None where one of them tells no ids."""
    if not all(record.token_ids for record in (*ours, *theirs)) or len(ours) != len(theirs):
        return None
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(ours, theirs)]
    same = [common_prefix(a, b) for a, b in pairs]
    total = sum(len(a) for a, _ in pairs)
    return Agreement(len(pairs), sum(a == b for a, b in pairs), sum(same) / total if total else 0.0)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return len(os.path.commonprefix([list(a), list(b)]))


async def margins(
    address: str, prompts: Sequence[Sequence[int]], ours: Sequence[RequestRecord], theirs: Sequence[RequestRecord]
) -> tuple[float, ...]:
    """Asks our server what it gives both choices at each first difference."""
    found = []
    async with AsyncClient(address) as client:
        for prompt, a, b in zip(prompts, ours, theirs):
            at = common_prefix(a.token_ids, b.token_ids)
            if at == min(len(a.token_ids), len(b.token_ids)) or len(found) == MAX_ASKED:
                continue
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=NUM_ALTERNATIVES, ignore_eos=True)
            request = GenerateRequest(prompt_token_ids=[*prompt, *a.token_ids[:at]], sampling_params=params)
            (position,) = (await client.generate_unary(request)).outputs[0].logprobs
            given = {one.token_id: one.logprob for one in position.top}
            found.append(position.top[0].logprob - given.get(b.token_ids[at], position.top[-1].logprob))
    return tuple(found)
