"""XLA's binary interface for custom calls, as IR: reading a call's buffers, and running a loop on XLA's own threads.

Offsets are those of xla/ffi/api/c_api.h (version 0.x, which promises not to move them; jax.ffi.include_dir() has the file).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter, function, i32, i64, ptr

# XLA_FFI_CallFrame
_EXTENSION, _API, _CONTEXT, _ARGS, _RETS = 8, 16, 24, 72, 112
# XLA_FFI_Buffer
_DATA, _DIMS = 24, 40
# XLA_FFI_Metadata_Extension, XLA_FFI_Metadata; XLA_FFI_Api
_METADATA, _METADATA_VERSION, _TRAITS, _STATE_TYPE, _API_VERSION = 24, 24, 32, 40, 32
_SCHEDULE = 136

# The job that threads share: counters, then the call's values.
_NEXT, _DONE, _OWNERS, _SLOTS, _NUM_CHUNKS, _NUM_FIRST, _FIRST_DONE, _VALUES = 0, 8, 16, 24, 32, 40, 48, 64

Plan = Callable[[Emitter, list[ir.Value], list[ir.Value]], tuple[list[ir.Value], ir.Value, ir.Value]]
Chunk = Callable[[Emitter, list[ir.Value], ir.Value, ir.Value, ir.Value], None]


def buffers(b: Emitter, frame: ir.Value, num_args: int, num_rets: int) -> tuple[list[ir.Value], list[ir.Value]]:
    """The XLA_FFI_Buffer pointers of a call's arguments and results."""
    args, rets = b.read(frame, _ARGS, ptr, 8), b.read(frame, _RETS, ptr, 8)
    return [b.read(args, 8 * i, ptr, 8) for i in range(num_args)], [b.read(rets, 8 * i, ptr, 8) for i in range(num_rets)]


def data(b: Emitter, buffer: ir.Value) -> ir.Value:
    return b.read(buffer, _DATA, ptr, 8)


def dim(b: Emitter, buffer: ir.Value, axis: int) -> ir.Value:
    return b.read(b.read(buffer, _DIMS, ptr, 8), 8 * axis, i64, 8)


def add_handler(
    module: ir.Module,
    name: str,
    num_args: int,
    num_rets: int,
    plan: Plan,
    chunk: Chunk,
    num_slots: int,
) -> None:
    """Adds a handler that runs a loop of chunks on XLA's threads, the calling one among them.

    Args:
      plan: emits (values of the call, number of chunks, number of first chunks) from the buffers of arguments and results;
        later chunks may wait for the first ones (`wait_for_first`).
      chunk: emits the work of one chunk from (values, chunk, slot, job); `slot` is this thread's number in the call.
      num_slots: most threads of a call.

    A thread that comes when no chunk is left touches nothing but the job, which the last one frees: the call never waits for a
    thread that has not begun, so that calls at the same time cannot wait for each other.
    """
    handler, b = function(module, name, ptr, [ptr])
    frame = handler.args[0]
    extension = b.read(frame, _EXTENSION, ptr, 8)
    with b.if_then(b.is_set(extension)):
        _answer_metadata(b, frame, extension)
        b.ret(ir.Constant(ptr, None))
    values, num_chunks, num_first = plan(b, *buffers(b, frame, num_args, num_rets))
    leave = _add_leave(module, f"{name}_leave")
    steps = _add_steps(module, f"{name}_steps", [value.type for value in values], chunk)
    task = _add_task(module, f"{name}_task", steps, leave)
    helpers = b.minimum(b.sub(num_chunks, b.int(1)), num_slots - 1)
    job = b.intrinsic("malloc", ptr, [b.int(_VALUES + 8 * len(values))])
    counters = {_NEXT: 0, _DONE: 0, _OWNERS: b.plus(helpers, 1), _SLOTS: 0, _NUM_CHUNKS: num_chunks, _NUM_FIRST: num_first,
                _FIRST_DONE: 0}
    for offset, value in [*counters.items(), *((_VALUES + 8 * at, value) for at, value in enumerate(values))]:
        b.write(b.int(value), job, offset, 8)
    _schedule(b, frame, task, job, helpers)
    b.call(steps, [job])
    b.wait_while(lambda: b.icmp_signed("<", b.atomic_read(job, _DONE), num_chunks))
    b.call(leave, [job])
    b.ret(ir.Constant(ptr, None))


def wait_for_first(b: Emitter, job: ir.Value) -> None:
    """Waits until all first chunks are done, by threads that have begun them."""
    number = b.read(job, _NUM_FIRST, i64, 8)
    b.wait_while(lambda: b.icmp_signed("<", b.atomic_read(job, _FIRST_DONE), number))


def _answer_metadata(b: Emitter, frame: ir.Value, extension: ir.Value) -> None:
    """XLA asks at registration which version of the interface this is: its own, which has been checked by then."""
    metadata = b.read(extension, _METADATA, ptr, 8)
    b.write(b.read(b.read(frame, _API, ptr, 8), _API_VERSION, i64, 8), metadata, _METADATA_VERSION, 8)
    b.write(ir.Constant(i32, 0), metadata, _TRAITS)
    b.write(b.int(0), metadata, _STATE_TYPE, 8)


def _schedule(b: Emitter, frame: ir.Value, task: ir.Function, job: ir.Value, helpers: ir.Value) -> None:
    """Hands the job to `helpers` of XLA's threads; one that XLA refuses is one owner less."""
    call = b.read(b.read(frame, _API, ptr, 8), _SCHEDULE, ir.FunctionType(ptr, [ptr]).as_pointer(), 8)
    arguments = b.alloca(ir.ArrayType(i64, 5))
    size_and_extension = [b.int(40), b.int(0)]
    with b.loop(0, helpers):
        for at, value in enumerate([*size_and_extension, b.read(frame, _CONTEXT, ptr, 8), b.untyped(task), job]):
            b.write(value, arguments, 8 * at, 8)
        with b.if_then(b.is_set(b.call(call, [b.untyped(arguments)]))):
            b.atomic_rmw("sub", b.at(job, _OWNERS), b.int(1), "acq_rel")


def _add_steps(module: ir.Module, name: str, kinds: Sequence[ir.Type], chunk: Chunk) -> ir.Function:
    """void steps(job): takes chunks until none is left."""
    made, b = function(module, name, ir.VoidType(), [ptr])
    job = made.args[0]
    slot = b.atomic_add(job, _SLOTS)
    num_chunks = b.read(job, _NUM_CHUNKS, i64, 8)
    num_first = b.read(job, _NUM_FIRST, i64, 8)
    index = b.alloca(i64)
    b.store(b.atomic_add(job, _NEXT), index)
    with b.while_(lambda: b.icmp_signed("<", b.load(index, typ=i64), num_chunks)):
        values = [b.read(job, _VALUES + 8 * at, kind, 8) for at, kind in enumerate(kinds)]
        taken = b.load(index, typ=i64)
        chunk(b, values, taken, slot, job)
        with b.if_then(b.icmp_signed("<", taken, num_first)):
            b.atomic_add(job, _FIRST_DONE)
        b.atomic_add(job, _DONE)
        b.store(b.atomic_add(job, _NEXT), index)
    b.ret_void()
    return made


def _add_leave(module: ir.Module, name: str) -> ir.Function:
    """void leave(job): the last owner frees the job."""
    made, b = function(module, name, ir.VoidType(), [ptr])
    job = made.args[0]
    before = b.atomic_rmw("sub", b.at(job, _OWNERS), b.int(1), "acq_rel")
    with b.if_then(b.icmp_signed("==", before, b.int(1))):
        b.intrinsic("free", ir.VoidType(), [job])
    b.ret_void()
    return made


def _add_task(module: ir.Module, name: str, steps: ir.Function, leave: ir.Function) -> ir.Function:
    """void task(job): what XLA's thread runs."""
    made, b = function(module, name, ir.VoidType(), [ptr])
    b.call(steps, [made.args[0]])
    b.call(leave, [made.args[0]])
    b.ret_void()
    return made
