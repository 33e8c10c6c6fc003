"""The rate of large matrix products here and now, against which benches hold what they time."""

import time
from collections.abc import Callable

import torch

PEAK_SIZE = {"cpu": 2048, "cuda": 8192}  # rows and columns of the product that measures the peak


def seconds(function: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_flops(device: str) -> float:
    """Operations a second of a large matrix product, the best of five."""
    n = PEAK_SIZE[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = torch.randn(2, n, n, device=device).to(dtype)
    return 2 * n**3 / min(seconds(lambda: left @ right, device) for _ in range(5))
