from . import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "path", "context_length", "vocab_size", "bos_token_id", "eos_token_ids", "dtype", "kv_dtype", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "generation_defaults", "capabilities", "has_chat_template", "digest", "family", "num_parameters", "attention")
    class CapabilitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bool] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    context_length: int
    vocab_size: int
    bos_token_id: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    generation_defaults: _sampling_pb2.SamplingParams
    capabilities: _containers.ScalarMap[str, bool]
    has_chat_template: bool
    digest: str
    family: str
    num_parameters: int
    attention: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., bos_token_id: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., generation_defaults: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., capabilities: _Optional[_Mapping[str, bool]] = ..., has_chat_template: _Optional[bool] = ..., digest: _Optional[str] = ..., family: _Optional[str] = ..., num_parameters: _Optional[int] = ..., attention: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "uptime_s", "state", "jax_version", "platform", "devices", "config_json")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    JAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_s: float
    state: str
    jax_version: str
    platform: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    config_json: str
    def __init__(self, version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., state: _Optional[str] = ..., jax_version: _Optional[str] = ..., platform: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., config_json: _Optional[str] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "kv_usage", "num_free_blocks", "num_total_blocks", "num_cached_blocks", "prompt_tokens", "generated_tokens", "prefix_cache_queried_tokens", "prefix_cache_hit_tokens", "num_steps", "scheduled_tokens", "padded_tokens", "num_preemptions", "preempted_tokens_lost", "compiles_after_ready", "requests_accepted", "requests_refused", "requests_stopped", "requests_length", "requests_aborted", "requests_failed", "num_open_streams", "max_open_streams", "num_saved_blocks", "num_swap_preemptions", "swapped_out_bytes", "swapped_in_bytes", "host_tier_hit_tokens", "disk_tier_hit_tokens", "num_host_cached_blocks", "host_tier_saved_bytes", "host_tier_loaded_bytes", "disk_tier_saved_bytes", "disk_tier_loaded_bytes")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_TOKENS_LOST_FIELD_NUMBER: _ClassVar[int]
    COMPILES_AFTER_READY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_STOPPED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_TIER_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TIER_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_TIER_SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_TIER_LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_TIER_SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_TIER_LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    kv_usage: float
    num_free_blocks: int
    num_total_blocks: int
    num_cached_blocks: int
    prompt_tokens: int
    generated_tokens: int
    prefix_cache_queried_tokens: int
    prefix_cache_hit_tokens: int
    num_steps: int
    scheduled_tokens: int
    padded_tokens: int
    num_preemptions: int
    preempted_tokens_lost: int
    compiles_after_ready: int
    requests_accepted: int
    requests_refused: int
    requests_stopped: int
    requests_length: int
    requests_aborted: int
    requests_failed: int
    num_open_streams: int
    max_open_streams: int
    num_saved_blocks: int
    num_swap_preemptions: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    host_tier_hit_tokens: int
    disk_tier_hit_tokens: int
    num_host_cached_blocks: int
    host_tier_saved_bytes: int
    host_tier_loaded_bytes: int
    disk_tier_saved_bytes: int
    disk_tier_loaded_bytes: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., num_free_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prefix_cache_queried_tokens: _Optional[int] = ..., prefix_cache_hit_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., scheduled_tokens: _Optional[int] = ..., padded_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., preempted_tokens_lost: _Optional[int] = ..., compiles_after_ready: _Optional[int] = ..., requests_accepted: _Optional[int] = ..., requests_refused: _Optional[int] = ..., requests_stopped: _Optional[int] = ..., requests_length: _Optional[int] = ..., requests_aborted: _Optional[int] = ..., requests_failed: _Optional[int] = ..., num_open_streams: _Optional[int] = ..., max_open_streams: _Optional[int] = ..., num_saved_blocks: _Optional[int] = ..., num_swap_preemptions: _Optional[int] = ..., swapped_out_bytes: _Optional[int] = ..., swapped_in_bytes: _Optional[int] = ..., host_tier_hit_tokens: _Optional[int] = ..., disk_tier_hit_tokens: _Optional[int] = ..., num_host_cached_blocks: _Optional[int] = ..., host_tier_saved_bytes: _Optional[int] = ..., host_tier_loaded_bytes: _Optional[int] = ..., disk_tier_saved_bytes: _Optional[int] = ..., disk_tier_loaded_bytes: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: _Optional[bool] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_open_streams",)
    NUM_OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    num_open_streams: int
    def __init__(self, num_open_streams: _Optional[int] = ...) -> None: ...

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIntegrityResponse(_message.Message):
    __slots__ = ("ok", "violations")
    OK_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    violations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ok: _Optional[bool] = ..., violations: _Optional[_Iterable[str]] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ("after_sequence_number",)
    AFTER_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    after_sequence_number: int
    def __init__(self, after_sequence_number: _Optional[int] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("sequence_number", "stored", "removed", "cleared")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: CacheCleared
    def __init__(self, sequence_number: _Optional[int] = ..., stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("block_keys", "parent_key", "token_ids", "block_size", "lora_name")
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    parent_key: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    lora_name: str
    def __init__(self, block_keys: _Optional[_Iterable[bytes]] = ..., parent_key: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., lora_name: _Optional[str] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("block_keys",)
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadLoraRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoraInfo(_message.Message):
    __slots__ = ("name", "path", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    rank: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class ListLorasResponse(_message.Message):
    __slots__ = ("loras",)
    LORAS_FIELD_NUMBER: _ClassVar[int]
    loras: _containers.RepeatedCompositeFieldContainer[LoraInfo]
    def __init__(self, loras: _Optional[_Iterable[_Union[LoraInfo, _Mapping]]] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("output_dir", "num_steps")
    OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    output_dir: str
    num_steps: int
    def __init__(self, output_dir: _Optional[str] = ..., num_steps: _Optional[int] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("output_dir",)
    OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    output_dir: str
    def __init__(self, output_dir: _Optional[str] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("output_dir",)
    OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    output_dir: str
    def __init__(self, output_dir: _Optional[str] = ...) -> None: ...
