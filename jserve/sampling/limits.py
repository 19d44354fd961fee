"""What a model and this build allow a request to ask: the caps, and `ModelLimits`.

Knows no request and no array library.  `engine.build` makes one ModelLimits at start; the validator reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MIN_TEMPERATURE = 0.01
"""Temperatures in (0, MIN_TEMPERATURE) are raised to it: below, float32 logits / temperature loses the distribution."""
MAX_SEQUENCES_PER_REQUEST = 64
"""Largest n, best_of and beam_width."""
MAX_LOGPROBS = 20
"""Largest logprobs and prompt_logprobs; the sampler's top lists have this many columns."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 48
MAX_EOS_TOKEN_IDS = 16
MAX_BANNED_TOKEN_IDS = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS
"""Columns of the sampler's banned-id rows: every id that min_tokens may have to mask."""
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
"""A word is spelled in two ways: at the start of a text and after a blank."""
MAX_CHOICES = 1024
MAX_REQUEST_ID_CHARACTERS = 256
MAX_CACHE_SALT_CHARACTERS = 256


@dataclass(frozen=True)
class ModelLimits:
    """The facts of a loaded model that decide whether a request can be served."""

    context_length: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    """Rows of the embedding: ids from 0 up to here may stand in a prompt."""
    eos_token_ids: tuple[int, ...] = ()
    """All EOS ids, those of generation_config included."""
    generation_defaults: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """The model's generation_config (see `validate.generation_defaults`); empty under `--generation-config none`."""
    max_pool_tokens: int | None = None
    """Tokens that one sequence alone in the KV pool can hold; None: no limit but the context."""
    block_size: int = 1
    """Tokens a KV block."""
    max_num_seqs: int | None = None
    """Sequences that run at once; None: no limit."""
    num_real_tokens: int | None = None
    """Ids that the tokenizer knows; the sampler returns none beyond. None: vocab_size."""
    max_prompt_characters: int | None = None
    """Longest prompt text worth tokenising, for example context_length times the longest token. None: no limit."""
    encode_word: Callable[[str], list[int]] | None = None
    """Ids of a word, nothing added around it; for bad_words."""

    def __post_init__(self):
        if self.context_length < 1 or self.vocab_size < 1:
            raise ValueError(f"context_length {self.context_length} and vocab_size {self.vocab_size} must be positive")
        if not 0 < self.num_sampled_tokens <= self.vocab_size:
            raise ValueError(f"num_real_tokens {self.num_real_tokens} must be in 1..{self.vocab_size} (vocab_size)")
        if len(self.eos_token_ids) > MAX_EOS_TOKEN_IDS:
            raise ValueError(f"{len(self.eos_token_ids)} EOS ids; at most {MAX_EOS_TOKEN_IDS} are supported")
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"EOS id {token_id} is outside the vocabulary of {self.vocab_size}")

    @property
    def num_sampled_tokens(self) -> int:
        """Ids that may be sampled: 0 up to here."""
        return self.vocab_size if self.num_real_tokens is None else self.num_real_tokens
