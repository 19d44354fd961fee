"""A prediction as JSON, and the human tables' numbers in one place."""

from __future__ import annotations

from typing import Any

from jserve.planner.deployment import Chunk, Deployment, Step


def to_json(plan: Deployment, compile_plan: dict[str, Any]) -> dict[str, Any]:
    """The keys that clients rely on, and ours; bytes and tokens are of one device, unless a comment says otherwise."""
    roofline, memory, question = plan.roofline, plan.memory, plan.question
    model, devices = roofline.model, roofline.tensor_parallel_size
    return {
        "model": model.name,
        "device": roofline.device.name,
        "num_parameters": model.num_parameters,
        "dtype": roofline.dtype,
        "kv_dtype": roofline.kv_dtype,
        "tensor_parallel_size": devices,
        "num_replicas": max(1, roofline.device.num_devices // devices),
        "context": question.context,
        "mean_length": question.mean_length,
        "device_bytes": memory.device_bytes,
        "usable_bytes": memory.usable_bytes,
        "reserve_bytes": memory.reserve_bytes,
        "weight_bytes": roofline.weight_bytes,  # of the whole model
        "weight_bytes_per_device": memory.weight_bytes,
        "kv_bytes_per_token": sum(memory.kv_bytes_per_token),
        "kv_bytes_per_token_by_group": [
            {"num_layers": group.num_layers, "window": group.window, "bytes": count}
            for group, count in zip(model.groups, memory.kv_bytes_per_token)
        ],
        "kv_pool_bytes": memory.pool_bytes,
        "kv_pool_tokens": memory.pool_tokens,
        "block_size": memory.block_size,
        "num_blocks": memory.num_blocks,
        "max_sequences": {"paged": plan.max_paged, "preallocated": plan.max_preallocated},
        "paged_over_preallocated": _ratio(plan.max_paged, plan.max_preallocated),
        "max_sequences_by_block_size": {
            str(size): memory.max_paged(question.mean_length, size) for size in (16, 32, 64, 128)
        },
        "block_waste": {
            "tokens": (memory.block_size - 1) / 2,
            "share": (memory.block_size - 1) / 2 / question.mean_length,
        },
        "steps": [_step(step) for step in plan.steps],
        "paging_gain": paging_gain(plan),
        "prefill": [_chunk(chunk) for chunk in plan.chunks.whole_budget],
        "chunk_schedule": {
            "prompt": plan.chunks.prompt,
            "decodes": plan.chunks.decodes,
            "budget": plan.chunks.budget,
            "num_steps": len(plan.chunks.counted),
            "num_steps_whole_budget": len(plan.chunks.whole_budget),
            "chunks": [_chunk(chunk) for chunk in plan.chunks.counted],
            "whole_prompt": {
                **_chunk(plan.chunks.whole_prompt),
                "ms_at_half_rate": 2e3 * plan.chunks.whole_prompt.seconds,
            },
        },
        "prefix_hit": {
            "prompt": plan.prefix.prompt,
            "shared": plan.prefix.shared,
            "num_blocks": plan.prefix.num_blocks,
            "hit_tokens": plan.prefix.num_hit,
            "tokens_to_prefill": plan.prefix.num_left,
            "share": plan.prefix.num_left / plan.prefix.prompt,
        },
        "recommended": {
            "max_num_batched_tokens": plan.recommended.max_num_batched_tokens,
            "max_num_seqs": plan.recommended.max_num_seqs,
            "target_tbt_ms": 1e3 * question.target_tbt_s,
            "token_buckets": list(plan.recommended.token_buckets),
            "sequence_buckets": list(plan.recommended.sequence_buckets),
        },
        "compile_plan": compile_plan,
    }


def paging_gain(plan: Deployment) -> dict[str, float] | None:
    """What the larger batch of a paged pool brings: token rate, and how much longer a step takes."""
    by_batch = {step.batch: step for step in plan.steps}
    small, large = by_batch.get(plan.max_preallocated), by_batch.get(plan.max_paged)
    if small is None or large is None:
        return None
    return {
        "tokens_per_s": large.tokens_per_s / small.tokens_per_s,
        "step_time": large.seconds / small.seconds,
    }


def _step(step: Step) -> dict[str, float]:
    return {
        "batch": step.batch,
        "context": step.context,
        "bytes": step.bytes,
        "lower_bound_ms": 1e3 * step.seconds,
        "tokens_per_s": step.tokens_per_s,
    }


def _chunk(chunk: Chunk) -> dict[str, float]:
    return {"chunk": chunk.num_tokens, "past": chunk.past, "flops": chunk.flops, "ms": 1e3 * chunk.seconds}


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
