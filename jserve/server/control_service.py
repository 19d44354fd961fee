"""The Control service: facts, loads and the few things an operator may do.  Never waits behind generation."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import time
from collections.abc import Callable

import grpc

import jserve
from jserve.proto_gen import control_pb2 as pb
from jserve.request import Code, RequestError, SamplingParams, invalid
from jserve.server.convert import sampling_params_to_proto
from jserve.server.state import ServerState

_INFO_FIELDS = ("name", "path", "family", "num_parameters", "context_length", "vocab_size", "bos_token_id", "dtype",
                "kv_dtype", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "has_chat_template",
                "digest", "attention")
_OUR_LOADS = ("num_open_streams", "max_open_streams")
_ENGINE_LOADS = tuple(field.name for field in pb.GetLoadsResponse.DESCRIPTOR.fields if field.name not in _OUR_LOADS)


ADMIN_METHODS = frozenset(("Abort", "FlushCache", "SubscribeKvEvents", "LoadLora", "UnloadLora", "StartProfile",
                           "StopProfile", "Drain"))
"""Need the role admin where tokens are used: they change what everybody gets, or show everybody's tokens."""


class ControlService:
    def __init__(self, state: ServerState, begin_drain: Callable[[float | None], None]):
        """`begin_drain(timeout_s)` returns at once; None is the configured time."""
        self._state = state
        self._begin_drain = begin_drain

    async def GetModelInfo(
        self, _: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        info = self._state.engine_when_ready().info
        return pb.GetModelInfoResponse(
            **{name: getattr(info, name) for name in _INFO_FIELDS},
            eos_token_ids=sorted(info.eos_token_ids),
            generation_defaults=sampling_params_to_proto(SamplingParams(**info.generation_defaults)),
            capabilities=dict(info.capabilities),
        )

    async def GetServerInfo(
        self, _: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        engine = self._state.engine
        config = self._state.config if engine is None else engine.config
        response = pb.GetServerInfoResponse(
            version=jserve.__version__,
            uptime_s=time.monotonic() - self._state.started,
            state=self._state.name,
            jax_version=importlib.metadata.version("jax"),
            config_json=json.dumps(dataclasses.asdict(config)),
        )
        if engine is not None:
            response.platform = engine.info.platform
            response.devices.extend(engine.info.devices)
        return response

    async def GetLoads(self, _: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        loads = self._state.engine_when_ready().loads()
        return pb.GetLoadsResponse(
            **{name: getattr(loads, name) for name in _ENGINE_LOADS},
            num_open_streams=len(self._state.calls),
            max_open_streams=self._state.calls.limit,
        )

    async def Abort(self, message: pb.AbortRequest, _: grpc.aio.ServicerContext) -> pb.AbortResponse:
        if not message.request_id:
            raise RequestError(Code.INVALID_ARGUMENT, "request_id: must be set", field="request_id")
        return pb.AbortResponse(aborted=await self._state.engine_when_ready().abort(message.request_id))

    async def FlushCache(self, _: pb.FlushCacheRequest, context: grpc.aio.ServicerContext) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(num_blocks=await self._state.engine_when_ready().flush_cache())

    async def CheckIntegrity(
        self, _: pb.CheckIntegrityRequest, context: grpc.aio.ServicerContext
    ) -> pb.CheckIntegrityResponse:
        violations = await self._state.engine_when_ready().check_integrity()
        return pb.CheckIntegrityResponse(ok=not violations, violations=violations)

    async def StartProfile(self, message: pb.StartProfileRequest, _: grpc.aio.ServicerContext) -> pb.StartProfileResponse:
        num_steps = message.num_steps if message.HasField("num_steps") else None
        folder = await self._state.engine_when_ready().start_profile(message.output_dir or None, num_steps)
        return pb.StartProfileResponse(output_dir=folder)

    async def StopProfile(self, _: pb.StopProfileRequest, context: grpc.aio.ServicerContext) -> pb.StopProfileResponse:
        return pb.StopProfileResponse(output_dir=await self._state.engine_when_ready().stop_profile())

    async def Drain(self, message: pb.DrainRequest, _: grpc.aio.ServicerContext) -> pb.DrainResponse:
        timeout_s = message.timeout_s if message.HasField("timeout_s") else None
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise invalid("timeout_s", timeout_s, "must be finite and 0 or larger")
        self._begin_drain(timeout_s)
        return pb.DrainResponse(num_open_streams=len(self._state.calls))
