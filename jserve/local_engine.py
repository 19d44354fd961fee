"""An engine in this process: started without blocking the event loop, and how much to hand it at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

from jserve.config import Config

BUILD_THREAD = "jserve-build"

ONE_STREAM_TOKEN_BUCKETS = (16, 128)
"""Besides the whole budget: enough for one prompt at a time, and a start compiles a fraction of a server's shapes."""


async def start_engine(config: Config, report):
    """The engine of `config`, ready, its model fetched where needed.

    Args:
      report: has line(text) and progress(phase, done, total), see `jserve.engine.build.Report`.
    Raises:
      ConfigError, ModelError, TokenizerError: one line that names what is wrong.
    """

    def build():
        import jax

        from jserve.doctor.devices import unused
        from jserve.engine.build import build_engine
        from jserve.engine.settings import check_settings
        from jserve.weights.fetch import with_model_on_disk

        check_settings(config)  # a bad one should not cost a fetch and a load
        if not os.environ.get("JAX_PLATFORMS"):  # else somebody chose
            for text, next_step in unused(jax.default_backend(), os.environ):
                report.line(f"warning: {text}; next: {next_step}")
        return build_engine(with_model_on_disk(config, report.line), report)

    return await _in_daemon_thread(build, BUILD_THREAD)


def for_one_stream(config: Config, num_outputs: int = 1) -> Config:
    """The config of an engine that serves one request at a time: few shapes, so that it starts fast."""
    if config.scheduler.max_num_seqs is None:
        config = config.replace("scheduler", max_num_seqs=max(1, num_outputs))
    budget = config.scheduler.max_num_batched_tokens
    if config.compile.token_buckets is None and not config.compile.deterministic:
        buckets = tuple(size for size in ONE_STREAM_TOKEN_BUCKETS if budget is None or size <= budget)
        config = config.replace("compile", token_buckets=buckets)
    return config


def most_in_flight(engine, max_waiting: int) -> int:
    """Requests to hand over at once: as many again as can run, so that no step is short, but none that is refused."""
    return max(1, min(2 * engine.info.max_num_seqs, max_waiting))


async def _in_daemon_thread(function: Callable, name: str):
    """As asyncio.to_thread, but an exit of the process does not wait for the thread: a start cannot be interrupted."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def set_unless_cancelled(setter: Callable, value) -> None:
        if not future.cancelled():
            setter(value)

    def work() -> None:
        try:
            outcome = future.set_result, function()
        except BaseException as error:
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(set_unless_cancelled, *outcome)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        return await future
    finally:
        if not future.cancelled():
            thread.join()  # it has handed over its outcome and is about to end
