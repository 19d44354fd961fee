"""The ledger of pools and tables: what must hold between any two calls, checked by looking at everything.

Vectorised, so that tests can run it after every step; the prefix index checks itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jserve.kv.block_pool import DEAD_BLOCK, BlockPool
from jserve.kv.block_tables import BlockTables


def table_violations(memory: BlockTables) -> list[str]:
    """In words; empty when sound."""
    problems = []
    columns = np.arange(memory.max_blocks_per_seq)
    for group, (table, pool) in enumerate(zip(memory.tables, memory.pools)):
        in_use = (columns >= memory.num_behind[group, :, None]) & (columns < memory.num_blocks[:, None])
        owners = np.bincount(table[in_use], minlength=pool.num_blocks)
        # Entries that may still be written: from the first block that is not full on.
        writable = in_use & (columns >= (memory.num_computed // memory.block_size)[:, None])
        writable &= columns != memory.shared_last[:, None]
        exposed = writable & ((pool.num_owners[table] > 1) | pool.findable[table])
        violations = {
            "blocks whose owners differ from the table entries": owners != pool.num_owners,
            "slots with the dead block in a used entry": (in_use & (table == DEAD_BLOCK)).any(axis=1),
            "slots with a block in an unused entry": (~in_use & (table != DEAD_BLOCK)).any(axis=1),
            "empty slots with blocks": ~memory.live & (memory.num_blocks > 0),
            "slots that may write a shared or findable block": exposed.any(axis=1),
        }
        problems += [f"group {group}: {text}" for text in _described(violations) + pool_violations(pool)]
        for block in memory.due_blocks(group):
            if pool.num_owners[block] == 0 and not pool.findable[block]:
                problems.append(f"group {group}: a copy or load is due into block {block}, which is free")
    return problems


def host_violations(pools: Sequence[BlockPool], owners: Sequence[np.ndarray]) -> list[str]:
    """Of host memory; owners: per group, how many each host block should have."""
    problems = []
    for group, (pool, expected) in enumerate(zip(pools, owners)):
        violations = {"blocks whose owners differ from who uses them": expected != pool.num_owners}
        problems += [f"host memory, group {group}: {text}" for text in _described(violations) + pool_violations(pool)]
    return problems


def pool_violations(pool: BlockPool) -> list[str]:
    """Each block but the dead one is exactly one of used, cached, free; the counts say so."""
    free, cached = pool.free_blocks(), pool.cached_blocks()
    is_free = np.bincount(free, minlength=pool.num_blocks)
    is_cached = np.bincount(cached, minlength=pool.num_blocks)
    is_used = pool.num_owners > 0
    states = is_free + is_cached + is_used
    states[DEAD_BLOCK] += 1
    problems = _described(
        {
            "blocks not in exactly one of the states free, cached, used": states != 1,
            "blocks with negative owners": pool.num_owners < 0,
            "free blocks that are findable": (is_free > 0) & pool.findable,
            "cached blocks that are not findable": (is_cached > 0) & ~pool.findable,
        }
    )
    num_used = int(is_used.sum())
    if len(free) + len(cached) + num_used != pool.num_usable:
        problems.append(f"free {len(free)} + cached {len(cached)} + used {num_used} != total {pool.num_usable}")
    return problems


def _described(violations: dict[str, np.ndarray]) -> list[str]:
    return [f"{what}: {np.flatnonzero(where)[:8].tolist()}" for what, where in violations.items() if where.any()]
