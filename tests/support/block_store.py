"""A store for the disk tier that keeps blocks in a dict, copies when it is told to, and fails when it is told to."""

from __future__ import annotations

from collections.abc import Callable

from jserve.kv.disk_tier import Transfer


class MemoryStore:
    """Content is read and written when a transfer is completed, so that a host block that was given away too early, or
    is found too early, shows."""

    def __init__(self, read: Callable[[Transfer], object], write: Callable[[Transfer, object], None]):
        self._read, self._write = read, write
        self.blocks: dict[str, tuple[bytes, object]] = {}
        self.under_way: list[tuple[str, str, bytes, Transfer, int]] = []
        self._done: list[tuple[Transfer, bool]] = []
        self._num_flushes = 0

    def holds(self, name: str) -> bool:
        return name in self.blocks

    def put(self, name: str, label: bytes, transfer: Transfer) -> None:
        self.under_way.append(("put", name, label, transfer, self._num_flushes))

    def get(self, name: str, label: bytes, transfer: Transfer) -> None:
        self.under_way.append(("get", name, label, transfer, self._num_flushes))

    def complete(self, place: int = 0, fails: bool = False) -> None:
        """One transfer that is under way."""
        kind, name, label, transfer, flushes = self.under_way.pop(place % len(self.under_way))
        copied = not fails
        if kind == "put":
            copied = copied and flushes == self._num_flushes
            if copied:
                self.blocks[name] = label, self._read(transfer)
        else:
            known = self.blocks.get(name)
            copied = copied and known is not None and known[0] == label
            if copied:
                self._write(transfer, known[1])
            else:
                self.blocks.pop(name, None)
        self._done.append((transfer, copied))

    def complete_all(self) -> None:
        while self.under_way:
            self.complete()

    def take_done(self) -> list[tuple[Transfer, bool]]:
        done, self._done = self._done, []
        return done

    def flush(self) -> None:
        self.blocks.clear()
        self._num_flushes += 1

    def check(self) -> list[str]:
        return []
