"""The CPU kernels compiled for this processor and made known to XLA; or the reason why there are none."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
from collections.abc import Callable
from typing import Any

import jax

_SIMD = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_TILES = ("amx-tile", "amx-bf16")
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
_COMPILED: dict[str, Any] = {}
_LOCK = threading.Lock()


@functools.cache
def why_no_simd() -> str | None:
    """What this machine lacks for kernels with AVX-512; None: nothing."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return f"the kernels are for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        return f"llvmlite cannot be imported: {error}"
    return _lacks(llvm.get_host_cpu_features(), _SIMD)


@functools.cache
def why_no_tiles() -> str | None:
    """What it lacks for kernels with matrix tiles."""
    if why_no_simd():
        return why_no_simd()
    import llvmlite.binding as llvm

    if lack := _lacks(llvm.get_host_cpu_features(), _TILES):
        return lack
    process = ctypes.CDLL(None, use_errno=True)
    if process.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA):  # Linux grants them to a process that asks
        return f"Linux does not grant matrix tiles: {os.strerror(ctypes.get_errno())}"
    return None


@functools.cache
def num_slots() -> int:
    """Most threads that share a call: a program's scratch memory and the kernels are made for as many, so it must not change."""
    return len(os.sched_getaffinity(0))


def compile_handler(name: str, add: Callable[..., None], *arguments: Any) -> str:
    """Compiles what `add(module, name, num_slots, *arguments)` emits, in well under a second, and registers it as `name`,
    once a process.  Programs are traced by several threads."""
    with _LOCK:
        if name not in _COMPILED:
            _COMPILED[name] = _compile(name, add, arguments)
    return name


def _compile(name: str, add: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """The code, registered; XLA may call it as long as the process lives."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    module.triple = llvm.get_process_triple()
    add(module, name, num_slots(), *arguments)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    target, features = llvm.Target.from_default_triple(), llvm.get_host_cpu_features().flatten()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address(name))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return engine


def _lacks(features: Any, needed: tuple[str, ...]) -> str | None:
    lacking = [name for name in needed if not features.get(name)]
    return f"the processor lacks {', '.join(lacking)}" if lacking else None
