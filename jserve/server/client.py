"""A blocking client of the jserve gRPC API in the dataclasses of jserve.request (asyncio: async_client).

Every error is a RequestError with the server's code, field and retry time.  A request's `deadline` becomes the call's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jserve.proto_gen import control_pb2, control_pb2_grpc, inference_pb2_grpc
from jserve.request import GenerateRequest, GenerateUpdate, Message, RequestError
from jserve.server import client_common, convert, convert_results
from jserve.server.client_common import MAX_MESSAGE_BYTES, ClientTls, as_request_errors


class Client:
    """May be used from several threads."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: ClientTls | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ):
        """`address` is host:port; `token` a bearer token; without `tls` the connection is readable by others.

        Nothing is connected before the first call.
        """
        options = client_common.channel_options(address, max_message_bytes, tls)
        self._metadata = client_common.call_metadata(token)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=options)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(self, request: GenerateRequest, *, stream_interval: int | None = None) -> Iterator[GenerateUpdate]:
        """Updates as they come.  The call starts with the first one asked for; closing the iterator cancels it."""
        message = convert.request_to_proto(request, stream_interval)
        with as_request_errors():
            call = self._inference.Generate(
                message, timeout=client_common.timeout_of(request), metadata=self._metadata)
            try:
                for response in call:
                    yield convert_results.update_from_proto(response)
            finally:
                call.cancel()

    def generate_unary(self, request: GenerateRequest) -> GenerateUpdate:
        """The whole result in one update."""
        message = convert.request_to_proto(request)
        response = self._call(self._inference.GenerateUnary, message, client_common.timeout_of(request))
        return convert_results.result_from_proto(response)

    def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
    ) -> list[int]:
        """Token ids of a text, or of messages through the chat template."""
        request = client_common.tokenize_request(prompt, add_special_tokens, add_generation_prompt)
        return list(self._call(self._inference.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        request = client_common.detokenize_request(token_ids, skip_special_tokens)
        return self._call(self._inference.Detokenize, request).text

    def model_info(self) -> control_pb2.GetModelInfoResponse:
        return self._call(self._control.GetModelInfo, control_pb2.GetModelInfoRequest())

    def server_info(self) -> control_pb2.GetServerInfoResponse:
        return self._call(self._control.GetServerInfo, control_pb2.GetServerInfoRequest())

    def loads(self) -> control_pb2.GetLoadsResponse:
        return self._call(self._control.GetLoads, control_pb2.GetLoadsRequest())

    def abort(self, request_id: str) -> bool:
        """Whether such a request was waiting or running."""
        return self._call(self._control.Abort, control_pb2.AbortRequest(request_id=request_id)).aborted

    def flush_cache(self) -> int:
        """Number of cached blocks forgotten."""
        return self._call(self._control.FlushCache, control_pb2.FlushCacheRequest()).num_blocks

    def check_integrity(self) -> list[str]:
        """One line a violation."""
        return list(self._call(self._control.CheckIntegrity, control_pb2.CheckIntegrityRequest()).violations)

    def start_profile(self, output_dir: str | None = None, num_steps: int | None = None) -> str:
        """Begins a jax.profiler trace; its folder on the server.  It stops by itself after `num_steps` steps."""
        request = control_pb2.StartProfileRequest(output_dir=output_dir, num_steps=num_steps)
        return self._call(self._control.StartProfile, request).output_dir

    def stop_profile(self) -> str:
        """Writes the trace; its folder on the server."""
        return self._call(self._control.StopProfile, control_pb2.StopProfileRequest()).output_dir

    def drain(self, timeout_s: float | None = None) -> None:
        """Starts the drain and returns; the server exits when it is done."""
        self._call(self._control.Drain, control_pb2.DrainRequest(timeout_s=timeout_s))

    def is_serving(self, service: str = "") -> bool:
        """What health says."""
        response = self._call(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def wait_until_ready(self, timeout_s: float) -> None:
        """Returns once health says SERVING; DEADLINE_EXCEEDED where it never does in that time."""
        end = time.monotonic() + timeout_s
        while True:
            failure = None
            try:
                if self.is_serving():
                    return
            except RequestError as error:
                failure = error
            client_common.raise_if_late(end, timeout_s, failure)
            time.sleep(client_common.READY_POLL_S)

    def _call(self, method, request, timeout: float | None = None):
        with as_request_errors():
            return method(request, timeout=timeout, metadata=self._metadata)
