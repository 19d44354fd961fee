"""The systems that are compared, sized by the planner for one model, device and context."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jserve.planner.capacity import Memory
from jserve.simulator.baselines import StaticBatching, WholePrefill
from jserve.simulator.engine import EngineSettings, EngineSystem
from jserve.simulator.steps import System

SYSTEMS = ("jserve", "static", "preallocated", "whole-prefill")


def make_systems(
    memory: Memory | None, settings: EngineSettings, num_rows: int | None = None
) -> Mapping[str, Callable[[], System]]:
    """A maker for each of SYSTEMS.

    Args:
      memory: how much KV fits; None: as much as the settings' blocks hold.
      num_rows: rows of the baselines that preallocate; None: as many as fit the pool, at most max_num_seqs.
    """
    context = settings.max_context
    capacity = (settings.num_blocks - 1) * settings.block_size
    fitting = memory.max_preallocated(context) if memory else capacity // context
    rows = num_rows or min(fitting, settings.max_num_seqs)
    return {
        "jserve": lambda: EngineSystem(settings),
        "static": lambda: StaticBatching(rows, context),
        "preallocated": lambda: WholePrefill(
            "preallocated", num_rows=rows, num_blocks=rows, block_size=context, max_context=context,
            budget=context, mix=True,
        ),
        "whole-prefill": lambda: WholePrefill(
            "whole-prefill", num_rows=settings.max_num_seqs, num_blocks=settings.num_blocks - 1,
            block_size=settings.block_size, max_context=context, budget=context, mix=False,
        ),
    }
