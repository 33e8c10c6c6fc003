"""What this machine does in a second."""

import time
from collections.abc import Callable

import torch

from support.placement import Rates


def measured(device: torch.device, dtype: torch.dtype) -> Rates:
    """Rates by the best of three tries each.

    Cost: 64 MiB on the host and on the device, three matrices there; a second on a slow machine
    """
    is_cuda = device.type == "cuda"
    n = 8192 if is_cuda else 512
    here, there = torch.ones(2**24, pin_memory=is_cuda), torch.empty(2**24, device=device)
    square = torch.ones(n, n, dtype=dtype, device=device)
    weights = torch.ones(2**22, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    adamw = torch.optim.AdamW([weights], fused=True)

    def seconds(action: Callable[[], object]) -> float:
        tries = []
        for _ in range(3):
            began = time.perf_counter()
            action()
            if is_cuda:
                torch.cuda.synchronize(device)
            tries.append(time.perf_counter() - began)
        return min(tries)

    return Rates(
        link=here.nbytes / seconds(lambda: there.copy_(here, non_blocking=True)),
        flops=2 * n**3 / seconds(lambda: square @ square),
        adamw=weights.numel() / seconds(adamw.step),
    )
