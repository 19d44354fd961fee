"""Every setting of jserve, in one place: frozen dataclasses, one line of doc under each field.

`auto` (None) values are resolved once, in `jserve.engine.settings`, and the resolved values are stored in a new config.
Nothing else in jserve reads an environment variable to decide how it behaves.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key, the value, and what would do."""


class BadUsage(ConfigError):
    """Settings that fit no machine and no model: a command ends with 2, as for a flag that does not exist."""


def _default_cache_dir() -> str:
    return str(Path.home() / ".cache" / "jserve")


@dataclass(frozen=True)
class ModelSection:
    path: str = "smollm2-135m"
    """smollm2-135m, a GGUF file, a folder (safetensors, or Orbax of `jserve convert`), hf:org/name or gs://bucket/folder."""
    dtype: str | None = None
    """Weights and activations: float32 or bfloat16. auto: float32 on CPU, bfloat16 elsewhere."""
    quantize: str = "none"
    """int8: matrices in 8 bits with a scale a row, 8-bit products; made while loading. none: as dtype says."""
    keep_packed: bool = True
    """Matrices of a GGUF file (Q4_0, Q4_1, Q8_0) stay in its bits where the CPU multiplies them as exactly as in float32."""
    context_length: int | None = None
    """Longest prompt + output in tokens. auto: what the model was made for."""
    generation_config: str = "auto"
    """auto: the model's generation_config fills unset sampling fields; none: it does not (its EOS ids still count)."""
    verify: bool = False
    """Compare the folder with the digests that `jserve convert` wrote beside it, before it is loaded."""
    served_name: str | None = None
    """Name that GetModelInfo shows. auto: the model's name or the last part of its path."""


@dataclass(frozen=True)
class KvSection:
    block_size: int | None = None
    """Tokens a block. auto: 32 on CPU, 64 on GPU and TPU (128 where one kv head is left per chip)."""
    num_blocks: int | None = None
    """Blocks in the pool, the dead block included. auto: what memory_fraction leaves after weights and activations."""
    memory_fraction: float = 0.9
    """Share of the device's memory that weights, activations and the pool may take together (accelerators)."""
    memory_bytes: int | None = None
    """Bytes of the pool, instead of memory_fraction. auto on CPU: 1 GiB, or less where memory is short."""
    dtype: str | None = None
    """f32, f16, bf16, int8 (CPU) or fp8, of keys and values. auto: the model's dtype; on CPU f32, and bf16 beside int8 matrices."""
    prefix_cache: bool = True
    """Reuse the blocks of equal prefixes across requests."""
    preemption: str = "auto"
    """When blocks run out: recompute (drop and compute again), swap (to host memory and back), auto: what costs less."""
    host_memory_bytes: int | None = None
    """Host memory for swapping and the host tier; 0: none. auto: as the pool, at most 4 GiB and a quarter of the free."""
    host_tier: bool = True
    """Cached blocks that the pool has no room for are kept in what swapping leaves free of host_memory_bytes."""
    disk_path: str | None = None
    """Folder for cached blocks that host memory has had, found again after a restart. unset: none."""
    disk_bytes: int = 16 * 2**30
    """Bytes that the files in disk_path may take together; the least recently used go first."""
    poison_freed: bool = False
    """For debugging: freed blocks are overwritten before every step, so that reading one changes the output."""


@dataclass(frozen=True)
class SchedulerSection:
    max_num_batched_tokens: int | None = None
    """Token budget of one step; never exceeded and never rounded up. auto: 512 on CPU, 2048 elsewhere."""
    max_num_seqs: int | None = None
    """Sequences that run at the same time. auto: 64 on CPU, 256 elsewhere."""
    max_waiting: int = 1024
    """Requests that may wait; the next one is refused with RESOURCE_EXHAUSTED."""
    policy: str = "fcfs"
    """fcfs, priority (may preempt), shortest-remaining, longest-prefix or fair (by tenant); none starves anybody."""
    ageing_s: float = 60.0
    """Seconds of waiting that outweigh one class of priority, or 1,000 tokens of work or of cached prefix."""
    tenant_weights: str = ""
    """Shares under policy fair, such as red=2,blue=1; a tenant that is not named has 1."""
    target_tbt_ms: float | None = None
    """Gap between tokens that steps keep: prefill gets what decodes leave of it. unset: the token budget alone."""
    deadline_admission: bool = False
    """Refuse a request whose deadline passes before its first tokens can be there (RESOURCE_EXHAUSTED, RetryInfo)."""
    overlap: bool = True
    """Plan and launch step N+1 while step N runs; results are read one step late. The tokens are the same."""
    jump_ahead: bool = True
    """Tokens that a grammar leaves no choice about are computed as a chunk, not one a step. The tokens are the same."""
    step_log: str | None = None
    """File for the scheduler's decisions, which `jserve replay` makes again; no text, no token ids. unset: none."""


@dataclass(frozen=True)
class CompileSection:
    cache_dir: str = field(default_factory=_default_cache_dir)
    """Folder of the persistent compile cache (and of fetched models); created where missing."""
    bundle: str | None = None
    """Folder (or gs://bucket/folder) of `jserve compile`: executables of exactly this config; nothing is compiled. unset: none."""
    token_buckets: tuple[int, ...] | None = None
    """Token buckets of mixed steps. auto: powers of two from 16 up to max_num_batched_tokens, which is always one."""
    sequence_buckets: tuple[int, ...] | None = None
    """Sequence buckets of decode steps. auto: powers of two up to max_num_seqs, which is always one."""
    deterministic: bool = False
    """A request's tokens and logprobs have the same bits whatever batch, chunks, cache or preemption it meets; slower."""
    forbid_compile: bool = False
    """A compile after readiness is an error instead of a counted event."""
    num_threads: int | None = None
    """Threads that compile the plan. auto: the number of CPU cores."""


@dataclass(frozen=True)
class ParallelSection:
    tensor_parallel_size: int = 1
    """Devices over which heads and ffn are split."""


@dataclass(frozen=True)
class KernelSection:
    attention: str | None = None
    """reference, xla, aligned, llvm_cpu, mosaic_tpu, mosaic_gpu or triton. auto: the best the platform has; an explicit one that cannot serve is an error."""


@dataclass(frozen=True)
class ServerSection:
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 50051
    """gRPC port; 0 picks a free one and prints it."""
    http_port: int | None = None
    """Port of the OpenAI-compatible HTTP server; 0 picks a free one and prints it. unset: none."""
    metrics_port: int | None = None
    """Port of the Prometheus text page. unset: none."""
    log_requests: bool = False
    """A log line for each request that ended: id, counts and times; never prompts or outputs."""
    log_format: str = "text"
    """text, or json: one object a line."""
    otlp_endpoint: str | None = None
    """Where OpenTelemetry spans of requests go, such as http://127.0.0.1:4318/v1/traces. unset: none."""
    drain_timeout_s: float = 30.0
    """Seconds that running requests get to finish after SIGTERM or Drain."""
    max_message_bytes: int = 64 * 1024 * 1024
    """Largest gRPC message, in and out."""
    max_concurrent_streams: int = 1024
    """Generation calls that may be open at once; the next one is refused with RESOURCE_EXHAUSTED."""
    insecure: bool = False
    """Allow a non-loopback host although there is neither TLS nor a token file."""
    tls_cert: str | None = None
    """PEM file with the server's certificate chain; read again when it changes. unset: no TLS."""
    tls_key: str | None = None
    """PEM file with the certificate's key, not encrypted. unset: no TLS."""
    tls_client_ca: str | None = None
    """PEM file with the CAs of client certificates, which every caller must then show (mutual TLS). unset: none."""
    auth_file: str | None = None
    """TOML file with hashed bearer tokens, their tenants and limits; read again when it changes. unset: no tokens."""
    trusted_proxies: str = ""
    """Names of client certificates, comma-separated, whose x-jserve-tenant metadata is believed."""


@dataclass(frozen=True)
class Config:
    """All of jserve's settings.  Keys in TOML and flags are `section.field`; see `jserve serve --help`."""

    model: ModelSection = ModelSection()
    kv: KvSection = KvSection()
    scheduler: SchedulerSection = SchedulerSection()
    compile: CompileSection = field(default_factory=CompileSection)
    parallel: ParallelSection = ParallelSection()
    kernel: KernelSection = KernelSection()
    server: ServerSection = ServerSection()

    def replace(self, section: str, **values) -> Config:
        """A copy with fields of one section changed."""
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **values)})
