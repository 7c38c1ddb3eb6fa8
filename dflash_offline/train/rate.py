"""How fast this device multiplies matrices: what a training step's arithmetic rate is compared with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIZE = {"cuda": 8192, "cpu": 512}
REPEATS = 10


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of a square matrix product on random numbers: 8192 in bfloat16 on a GPU, 512 in float32 on a CPU.

    Takes a few hundredths of a second; random state and reserved memory are as before.
    """
    import torch

    on_gpu = device.type == "cuda"
    size, dtype = SIZE[device.type], torch.bfloat16 if on_gpu else torch.float32
    generator = torch.Generator(device=device).manual_seed(0)
    factors = [torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2)]

    def multiply(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            torch.matmul(*factors)
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    multiply(3)
    rate = REPEATS * 2 * size**3 / multiply(REPEATS) / 1e12
    factors.clear()
    if on_gpu:
        torch.cuda.empty_cache()
    return rate
