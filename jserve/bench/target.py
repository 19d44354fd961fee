"""The server that a bench talks to: its address, what it says of itself, and streams of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from jserve.bench.driver import Stream, engine_stream
from jserve.bench.http_client import HttpClient
from jserve.bench.openai_stream import openai_stream
from jserve.config import ConfigError
from jserve.request import Code, RequestError

BACKENDS = ("jserve", "openai")
ANY_VOCABULARY = range(1000, 30_000)
"""Ids that are ordinary text in every vocabulary in use; for servers that do not tell theirs."""
COUNTERS = (
    "scheduled_tokens", "padded_tokens", "num_steps", "num_preemptions", "compiles_after_ready",
    "prefix_cache_queried_tokens", "prefix_cache_hit_tokens",
)
"""What a report takes the difference of, as GetLoads names it."""


@dataclass(frozen=True)
class Target:
    backend: str
    address: str
    """host:port of jserve's gRPC, or the URL of an OpenAI-compatible server."""
    model: str | None = None
    """For openai; unless given the first that the server lists."""
    token: str | None = None
    """Bearer token of whoever asks."""
    tls: object | None = None
    """A `server.client_common.ClientTls`; None: as the address says (http or https), gRPC in the clear."""

    def grpc_client(self):
        from jserve.server.async_client import AsyncClient

        return AsyncClient(self.address, token=self.token, tls=self.tls)

    def http_client(self) -> HttpClient:
        return HttpClient(self.address, self.token, None if self.tls is None else self.tls.ca)


@dataclass(frozen=True)
class ServerFacts:
    model_id: str
    context_length: int | None
    token_ids: tuple[int, ...] | range
    """Of ordinary text."""
    about: dict[str, object]


@asynccontextmanager
async def stream_of(target: Target) -> AsyncIterator[Stream]:
    """A connection of its own to the server."""
    if target.backend == "jserve":
        async with target.grpc_client() as client:
            yield engine_stream(client)
        return
    client = target.http_client()
    try:
        yield openai_stream(client, target.model or "")
    finally:
        await client.close()


async def ask(target: Target) -> ServerFacts:
    """RequestError where nobody answers."""
    return await (_ask_jserve(target) if target.backend == "jserve" else _ask_openai(target))


async def counters(target: Target) -> dict[str, int] | None:
    """Running totals of the server's steps; None where it does not tell, or no more."""
    if target.backend != "jserve":
        return None
    async with target.grpc_client() as client:
        try:
            loads = await client.loads()
        except RequestError:
            return None
    return {name: getattr(loads, name) for name in COUNTERS}


async def _ask_jserve(target: Target) -> ServerFacts:
    async with target.grpc_client() as client:
        info, server = await client.model_info(), await client.server_info()
        special = {*info.eos_token_ids, *([info.bos_token_id] if info.HasField("bos_token_id") else ())}
        special |= await _special_ids(client, 0, info.vocab_size)
    about = {
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype,
        "attention": info.attention,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "block_size": info.block_size,
        "server_version": server.version,
        "jax_version": server.jax_version,
        "device": server.devices[0] if server.devices else server.platform,
    }
    ordinary = tuple(token_id for token_id in range(info.vocab_size) if token_id not in special)
    return ServerFacts(info.name, info.context_length, ordinary, about)


async def _special_ids(client, first: int, last: int) -> set[int]:
    """Ids of first..last - 1 whose text is left out where special tokens are: halves are asked until one id is left."""
    ids = list(range(first, last))
    if not ids or await client.detokenize(ids) == await client.detokenize(ids, skip_special_tokens=True):
        return set()
    if len(ids) == 1:
        return {first}
    middle = (first + last) // 2
    return await _special_ids(client, first, middle) | await _special_ids(client, middle, last)


async def _ask_openai(target: Target) -> ServerFacts:
    client = target.http_client()
    try:
        answer = await client.get("/v1/models")
        version = await _version(client)
    finally:
        await client.close()
    models = {model.get("id"): model for model in answer.get("data") or ()}
    name = target.model or next(iter(models), None)
    if name is None:
        raise ConfigError(f"{target.address} lists no model; name one with --model")
    model = models.get(name, {})
    context = model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx_train")
    return ServerFacts(name, context, ANY_VOCABULARY, {"server_version": version} if version else {})


async def _version(client: HttpClient) -> str | None:
    """As vLLM and SGLang tell it."""
    try:
        answer = await client.get("/version")
    except RequestError as error:
        if error.code is Code.UNAVAILABLE:
            raise
        return None
    return answer.get("version") if isinstance(answer, dict) else None
