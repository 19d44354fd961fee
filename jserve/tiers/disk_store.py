"""KV blocks as files in a folder, with a budget in bytes; the least recently used go first. Survives a restart.

Copies run in threads of its own. Whatever goes wrong with a file is a block that is not there: a folder that cannot be
written to is read only, and says so once. Files with names of another kind are not touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jserve.kv.disk_tier import Transfer
from jserve.tiers import block_file

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{64}-[0-9]+\.kv")
RETRY_AFTER_S = 60.0
"""How long nothing is written after a write has failed."""


class DiskStore:
    """Invariant: the files that it knows take no more than the budget, by their sizes as they were written."""

    def __init__(self, folder: str | Path, budget_bytes: int):
        """Knows the files that are there; removes what a writer left unfinished, and what exceeds the budget."""
        self._folder = Path(folder)
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.num_bytes = 0
        self._num_flushes = 0
        self._write_after = 0.0
        self._has_complained = False
        self._done: deque[tuple[Transfer, bool]] = deque()
        self._writer = ThreadPoolExecutor(1, "jserve-kv-write")
        self._readers = ThreadPoolExecutor(2, "jserve-kv-read")
        self._memory: Callable[[int, int], np.ndarray] | None = None
        self._find_files()

    def attach(self, memory: Callable[[int, int], np.ndarray]) -> None:
        """memory(group, host block): the block's bytes, u8[n], to be read from and written to."""
        self._memory = memory

    @property
    def num_blocks(self) -> int:
        return len(self._sizes)

    def holds(self, name: str) -> bool:
        return name in self._sizes

    def put(self, name: str, label: bytes, transfer: Transfer) -> None:
        self._start(self._writer, self._write, name, label, transfer, self._num_flushes)

    def get(self, name: str, label: bytes, transfer: Transfer) -> None:
        self._start(self._readers, self._read, name, label, transfer)

    def take_done(self) -> list[tuple[Transfer, bool]]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def flush(self) -> None:
        with self._lock:
            self._num_flushes += 1
            names = list(self._sizes)
            self._sizes.clear()
            self.num_bytes = 0
        self._writer.submit(self._remove, names)

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes what was to be written, for so long; reads are given up."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        last = self._writer.submit(lambda: None)
        with contextlib.suppress(TimeoutError):
            last.result(timeout_s)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def check(self) -> list[str]:
        with self._lock:
            total = sum(self._sizes.values())
        problems = [f"disk: {total} bytes, budget {self._budget}"] if total > self._budget else []
        return problems + ([f"disk: {total} bytes, counted {self.num_bytes}"] if total != self.num_bytes else [])

    # -- in its threads

    def _start(
        self, threads: ThreadPoolExecutor, work: Callable[..., bool], name: str, label: bytes, transfer: Transfer, *more
    ) -> None:
        def report(future: Future) -> None:
            failed = future.cancelled() or future.exception() is not None
            if failed and not future.cancelled():
                log.error("a KV block was not copied", exc_info=future.exception())
            self._done.append((transfer, not failed and future.result()))

        threads.submit(work, name, label, transfer, *more).add_done_callback(report)

    def _write(self, name: str, label: bytes, transfer: Transfer, flushes: int) -> bool:
        data = self._memory(transfer.group, transfer.host_block)
        size = block_file.size_of(label, len(data))
        if flushes != self._num_flushes or size > self._budget or time.monotonic() < self._write_after:
            return False
        try:
            self._remove(self._make_room(size))
            block_file.write(self._path(name), label, data)
        except OSError as error:
            self._complain(error)
            return False
        with self._lock:
            if flushes == self._num_flushes:
                self.num_bytes += size - self._sizes.pop(name, 0)
                self._sizes[name] = size
                return True
        self._remove([name])
        return False

    def _read(self, name: str, label: bytes, transfer: Transfer) -> bool:
        path = self._path(name)
        try:
            block_file.read(path, label, self._memory(transfer.group, transfer.host_block))
        except (block_file.NotThisBlock, OSError) as error:
            self._forget(name)
            if isinstance(error, block_file.NotThisBlock):
                log.warning("KV block removed: %s", error)
                self._remove([name])
            return False
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        with contextlib.suppress(OSError):
            os.utime(path)  # the order of use, for the next start
        return True

    def _make_room(self, size: int) -> list[str]:
        """Names that have to go so that `size` more bytes fit."""
        names = []
        with self._lock:
            while self._sizes and self.num_bytes + size > self._budget:
                name, freed = self._sizes.popitem(last=False)
                self.num_bytes -= freed
                names.append(name)
        return names

    def _forget(self, name: str) -> None:
        with self._lock:
            self.num_bytes -= self._sizes.pop(name, 0)

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._path(name).unlink()

    def _find_files(self) -> None:
        found = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name):
                        with contextlib.suppress(FileNotFoundError):  # it has just gone
                            if entry.is_file():  # no folder, and no link to nothing
                                status = entry.stat()
                                found.append((status.st_mtime, entry.name.removesuffix(".kv"), status.st_size))
                    elif _NAME.fullmatch(entry.name.removesuffix(".partial")):
                        with contextlib.suppress(OSError):
                            os.unlink(entry.path)
        except OSError as error:
            self._complain(error)
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.num_bytes += size
        self._remove(self._make_room(0))

    def _complain(self, error: OSError) -> None:
        self._write_after = time.monotonic() + RETRY_AFTER_S
        if not self._has_complained:
            log.warning("KV blocks are not kept in %s: %s (tried again every %d s)", self._folder, error, RETRY_AFTER_S)
        self._has_complained = True

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.kv"
