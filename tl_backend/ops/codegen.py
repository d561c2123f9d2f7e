"""The code that TileLang generates for a kernel, on any machine: neither the device nor its compiler need be there."""

from __future__ import annotations

import re
from typing import NamedTuple

from tl_backend.ops.compiled import KernelKey, build_program, pass_configs

_STATIC_SHARED = re.compile(r"^\s*__shared__ (?:__align__\(\d+\) )?(\w+) \w+\[(\d+)\]", re.MULTILINE)
_BYTES = {"uint64_t": 8, "float": 4, "int": 4, "uchar": 1, "half_t": 2, "bfloat16_t": 2}


class GeneratedCode(NamedTuple):
    """Attributes: source: of the device's part; shared_memory: bytes that a block allocates, dynamic and static."""

    source: str
    shared_memory: int


def generate(key: KernelKey) -> GeneratedCode:
    """CUDA, HIP or C source of a kernel. Imports TileLang."""
    import tilelang
    from tilelang import tvm

    device = key.device
    host = ("c",) if device.vendor == "cpu" else ()
    target = tvm.target.Target(device.target, *host)
    switches = {config.value: value for config, value in pass_configs(key.kind).items()}
    with tvm.transform.PassContext(opt_level=3, config=switches), target:
        artifact = tilelang.lower(build_program(key), target=target)
    source = str(artifact.kernel_source)
    static = sum(_BYTES[kind] * int(count) for kind, count in _STATIC_SHARED.findall(source))
    functions = artifact.device_mod.functions.values() if device.is_gpu else ()
    dynamic = sum(int((function.attrs or {}).get("dyn_shared_memory_buf", 0)) for function in functions)
    return GeneratedCode(source, static + dynamic)
