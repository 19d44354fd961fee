"""A whole AsyncEngine, threads and all, over the stand-in runner: no model, next tokens one can compute by hand."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jserve.config import Config
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.loop import EngineLoop
from jserve.engine.streams import OutputThread
from jserve.kv import BlockManager, GroupSpec
from jserve.metrics import Histograms, RequestCounts
from jserve.runner.fake_runner import FakeRunner
from jserve.sampling.limits import ModelLimits
from jserve.scheduler import Scheduler, SchedulerLimits
from jserve.scheduler.buckets import powers_up_to
from tests.support.fake_engine import MODEL_INFO
from tests.support.in_process import ByteTokenizer

VOCAB_SIZE = 256


class AnyTokenizer(ByteTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id % 26])


class SlowRunner(FakeRunner):
    """Steps take real time."""

    def __init__(self, num_slots: int, step_s: float):
        super().__init__(num_slots, VOCAB_SIZE)
        self.step_s = step_s

    def collect(self):
        time.sleep(self.step_s)
        return super().collect()

    def reset(self) -> None:
        self._done.clear()


@contextmanager
def stand_in_engine(
    *, step_s: float = 0.001, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 4, budget: int = 16,
    max_waiting: int = 1000, cache_dir: Path | str = "/nonexistent", name: str = "stand-in",
) -> Iterator[AsyncEngine]:
    blocks = BlockManager(
        groups=[GroupSpec()], num_blocks=[num_blocks], block_size=block_size, num_slots=max_num_seqs,
        max_blocks_per_seq=num_blocks,
    )
    limits = SchedulerLimits(
        budget, max_num_seqs, powers_up_to(min(4, budget), budget), powers_up_to(1, max_num_seqs), 8
    )
    scheduler = Scheduler(limits, blocks)
    counts, histograms = RequestCounts(), Histograms(name)
    outputs = OutputThread(lambda sequence, reason: loop.finish(sequence, reason), counts, histograms)
    loop = EngineLoop(scheduler, SlowRunner(max_num_seqs, step_s), outputs.put, overlap=True, histograms=histograms)
    tokenizer = AnyTokenizer()
    engine = AsyncEngine(
        info=dataclasses.replace(MODEL_INFO, name=name, tokenizer=tokenizer, max_num_seqs=max_num_seqs),
        config=Config().replace("compile", cache_dir=str(cache_dir)),
        limits=ModelLimits(context_length=1024, vocab_size=VOCAB_SIZE, max_pool_tokens=(num_blocks - 1) * block_size),
        tokenizer=tokenizer, scheduler=scheduler, loop=loop, outputs=outputs, counts=counts, histograms=histograms,
        max_waiting=max_waiting, compiles_after_ready=lambda: 0, bytes_per_block=1,
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
