"""What this card reaches: the roofline's two lines."""

from __future__ import annotations

import statistics

import torch

from tl_backend.measure.timing import time_ms


def ceilings() -> dict[str, float]:
    """What this card reaches now: bf16 matmul (8192 cubed, random data) and device copy (bytes read plus written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = statistics.median(time_ms({"matmul": lambda: a @ b}, a.device)["matmul"])
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = statistics.median(time_ms({"copy": lambda: target.copy_(source)}, a.device)["copy"])
    return {"matmul_tflops": 2 * 8192**3 / matmul / 1e9, "copy_tbps": 2 * source.numel() / copy / 1e9}
