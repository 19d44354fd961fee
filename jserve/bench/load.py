"""Loads: which requests a bench sends, and when.

Prompts are token ids, so that lengths are exact, and no two runs share one unless they name the same seed.  A load is
`checked` against a model once; then it makes conversations, and warm-ups that share no prompt with them.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jserve.bench.driver import Conversation
from jserve.bench.trace import HASH_BLOCK, TraceRow
from jserve.config import ConfigError
from jserve.request import GenerateRequest, SamplingParams


class Load(Protocol):
    num_prompts: int

    def checked(self, context_length: int | None) -> Load:
        """Itself with a seed; ConfigError where the longest request cannot fit the context (None: unknown)."""

    def conversations(self, token_ids: Sequence[int]) -> list[Conversation]:
        """The measured requests, prompts drawn from `token_ids`."""

    def warm_ups(self, count: int, token_ids: Sequence[int]) -> list[GenerateRequest]:
        """Requests of the same kind that share no prompt with the measured ones."""

    def about(self) -> dict[str, object]:
        """What the report says of it."""


@dataclass(frozen=True)
class Output:
    """How outputs are asked for."""

    ignore_eos: bool = True
    temperature: float = 0.0

    def params(self, length: int, draw: random.Random) -> SamplingParams:
        seed = draw.getrandbits(31) if self.temperature > 0 else None
        return SamplingParams(
            temperature=self.temperature, max_tokens=length, ignore_eos=self.ignore_eos, seed=seed
        )


@dataclass(frozen=True)
class RandomLoad:
    """Prompts of random ordinary token ids."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    """Lengths are uniform in len * (1 - ratio) .. len * (1 + ratio)."""
    output: Output = Output()
    seed: int | None = None
    """None: drawn from the system."""

    def checked(self, context_length: int | None) -> RandomLoad:
        longest = int((self.input_len + self.output_len) * (1 + self.range_ratio))
        _check_fits(
            f"--random-input-len {self.input_len} + --random-output-len {self.output_len}", longest, context_length
        )
        return replace(self, seed=_seed(self.seed))

    def conversations(self, token_ids: Sequence[int]) -> list[Conversation]:
        return [Conversation((one,)) for one in self.requests(token_ids)]

    def requests(self, token_ids: Sequence[int]) -> list[GenerateRequest]:
        draw = random.Random(f"run {self.seed}")
        return [self.draw(draw, token_ids) for _ in range(self.num_prompts)]

    def warm_ups(self, count: int, token_ids: Sequence[int]) -> list[GenerateRequest]:
        draw = random.Random(f"warm-up {self.seed}")
        return [self.draw(draw, token_ids) for _ in range(count)]

    def draw(self, draw: random.Random, token_ids: Sequence[int], prefix: Sequence[int] = ()) -> GenerateRequest:
        prompt = [*prefix, *draw.choices(token_ids, k=self._length(draw, self.input_len))]
        params = self.output.params(self._length(draw, self.output_len), draw)
        return GenerateRequest(prompt_token_ids=prompt, sampling_params=params)

    def about(self) -> dict[str, object]:
        return {
            "dataset_name": "random",
            "num_prompts": self.num_prompts,
            "random_input_len": self.input_len,
            "random_output_len": self.output_len,
            "random_range_ratio": self.range_ratio,
            "ignore_eos": self.output.ignore_eos,
            "seed": self.seed,
        }

    def _length(self, draw: random.Random, length: int) -> int:
        return draw.randint(max(1, int(length * (1 - self.range_ratio))), max(1, int(length * (1 + self.range_ratio))))


@dataclass(frozen=True)
class SharedPrefixLoad:
    """Groups of users whose prompts begin alike; each user asks `num_turns` times, with all that was said before."""

    own: RandomLoad
    """What each turn adds: `num_prompts` counts turns of all users."""
    num_groups: int
    prefix_len: int
    num_turns: int = 1

    @property
    def num_prompts(self) -> int:
        return self.own.num_prompts

    def checked(self, context_length: int | None) -> SharedPrefixLoad:
        turn = int((self.own.input_len + self.own.output_len) * (1 + self.own.range_ratio))
        _check_fits(
            f"--shared-prefix-len {self.prefix_len} and {self.num_turns} turns",
            self.prefix_len + self.num_turns * turn, context_length,
        )
        return replace(self, own=self.own.checked(context_length))

    def conversations(self, token_ids: Sequence[int]) -> list[Conversation]:
        """Users of all groups take turns in coming."""
        draw = random.Random(f"run {self.own.seed}")
        prefixes = [self._prefix(f"group {group} {self.own.seed}", token_ids) for group in range(self.num_groups)]
        found, left = [], self.num_prompts
        while left > 0:
            num_turns = min(self.num_turns, left)
            prefix = prefixes[len(found) % self.num_groups]
            turns = [self.own.draw(draw, token_ids, () if turn else prefix) for turn in range(num_turns)]
            found.append(Conversation(tuple(turns)))
            left -= num_turns
        return found

    def warm_ups(self, count: int, token_ids: Sequence[int]) -> list[GenerateRequest]:
        draw = random.Random(f"warm-up {self.own.seed}")
        prefix = self._prefix(f"warm-up group {self.own.seed}", token_ids)
        return [self.own.draw(draw, token_ids, prefix) for _ in range(count)]

    def about(self) -> dict[str, object]:
        return self.own.about() | {
            "dataset_name": "shared-prefix",
            "shared_prefix_groups": self.num_groups,
            "shared_prefix_len": self.prefix_len,
            "shared_prefix_turns": self.num_turns,
        }

    def _prefix(self, name: str, token_ids: Sequence[int]) -> list[int]:
        return random.Random(f"prefix of {name}").choices(token_ids, k=self.prefix_len)


@dataclass(frozen=True)
class TraceLoad:
    """The lengths and times of a trace, with random tokens; blocks that it calls equal are equal."""

    rows: tuple[TraceRow, ...]
    name: str
    output: Output = Output()
    seed: int | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.rows)

    def checked(self, context_length: int | None) -> TraceLoad:
        longest = max(row.prompt_tokens + row.output_tokens for row in self.rows)
        _check_fits(f"--dataset-path {self.name}: the longest request", longest, context_length)
        return replace(self, seed=_seed(self.seed))

    def conversations(self, token_ids: Sequence[int]) -> list[Conversation]:
        draw = random.Random(f"run {self.seed}")
        return [Conversation((self._request(row, draw, token_ids),), row.start_s) for row in self.rows]

    def warm_ups(self, count: int, token_ids: Sequence[int]) -> list[GenerateRequest]:
        draw = random.Random(f"warm-up {self.seed}")
        rows = [replace(self.rows[at % len(self.rows)], hash_ids=()) for at in range(count)]
        return [self._request(row, draw, token_ids) for row in rows]

    def about(self) -> dict[str, object]:
        return {
            "dataset_name": "trace",
            "dataset_path": self.name,
            "num_prompts": len(self.rows),
            "ignore_eos": self.output.ignore_eos,
            "seed": self.seed,
        }

    def _request(self, row: TraceRow, draw: random.Random, token_ids: Sequence[int]) -> GenerateRequest:
        prompt: list[int] = []
        for hash_id in row.hash_ids[: row.prompt_tokens // HASH_BLOCK]:
            prompt += random.Random(f"block {hash_id} {self.seed}").choices(token_ids, k=HASH_BLOCK)
        prompt += draw.choices(token_ids, k=row.prompt_tokens - len(prompt))
        return GenerateRequest(prompt_token_ids=prompt, sampling_params=self.output.params(row.output_tokens, draw))


@dataclass(frozen=True)
class JsonlLoad:
    """Requests of a file, sent as they are."""

    requests: tuple[GenerateRequest, ...]
    name: str
    seed: int | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.requests)

    def checked(self, context_length: int | None) -> JsonlLoad:
        return replace(self, seed=_seed(self.seed))

    def conversations(self, token_ids: Sequence[int]) -> list[Conversation]:
        return [Conversation((one,)) for one in self.requests]

    def warm_ups(self, count: int, token_ids: Sequence[int]) -> list[GenerateRequest]:
        return RandomLoad(count, 32, 16, seed=self.seed).warm_ups(count, token_ids)

    def about(self) -> dict[str, object]:
        return {"dataset_name": "jsonl", "dataset_path": self.name, "num_prompts": len(self.requests),
                "seed": self.seed}


def ordinary_token_ids(info) -> list[int]:
    """Ids of the model's vocabulary that stand for text; control tokens could end or reshape a prompt."""
    special = set(info.eos_token_ids)
    return [i for i in range(info.tokenizer.vocab_size) if i not in special and not info.tokenizer.is_special(i)]


def _seed(seed: int | None) -> int:
    return secrets.randbits(48) if seed is None else seed


def _check_fits(what: str, longest: int, context_length: int | None) -> None:
    if context_length is not None and longest > context_length:
        raise ConfigError(f"{what} can be {longest} tokens; the model's context is {context_length}")
