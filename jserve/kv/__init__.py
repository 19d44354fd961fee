"""KV memory as an operating system would keep it: block pools, tables, copy-on-write, prefix cache. No JAX here.

The scheduler is the caller; BlockManager is the door.
"""

from jserve.kv.block_manager import BlockManager, CacheStats
from jserve.kv.groups import GroupSpec

__all__ = ["BlockManager", "CacheStats", "GroupSpec"]
