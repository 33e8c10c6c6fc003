"""CE"""

import torch
import torch.nn.functional as F

IGNORE = -100  # a target that counts for nothing: padding, or a token that BERT did not mask


class LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of x @ weight.T + bias, its logits made and spent a slab at a time.

    Equals F.cross_entropy(F.linear(x, weight, bias), targets, reduction="sum"), forward and
    backward. A slab's gradient follows from its own softmax, so it is taken at once and the (N, V)
    logits never exist: with V = 50,304 the plain form holds three arrays of 6 GB for 32,768 tokens.
    On a CPU it is also the faster one (bench/step.py). The idea: Liger Kernel.

    Args:    x (N, C), weight (V, C), bias (V,) or None, targets (N,) int64, grads bool
    Returns: scalar, float32 unless x is float64
    Cost:    the plain form's three matrix products; a slab of logits
    """

    @staticmethod
    def forward(ctx, x, weight, bias, targets, grads):
        N, V = len(x), len(weight)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        matrix = weight.to(dtype)
        loss = torch.zeros((), dtype=exact, device=x.device)
        dx, dweight = (torch.zeros_like(x), torch.zeros_like(weight)) if grads else (None, None)
        dbias = torch.zeros_like(bias) if grads and bias is not None else None
        with torch.autocast(device, enabled=False):
            for start in range(0, N, slab_rows(V, device)):
                rows = slice(start, start + slab_rows(V, device))
                x_rows, target = x[rows].to(dtype), targets[rows, None]
                logits = F.linear(x_rows, matrix).to(exact)  # (slab, V)
                if bias is not None:
                    logits += bias
                counts = target != IGNORE  # (slab, 1)
                target = target.clamp(min=0)
                top = logits.amax(1, keepdim=True)
                score = logits.gather(1, target) - top
                dlogits = logits.sub_(top).exp_()  # one pass for the loss and its gradient
                norm = dlogits.sum(1, keepdim=True)
                loss += ((norm.log() - score) * counts).sum()
                if not grads:
                    continue
                dlogits *= counts / norm  # softmax, zero where ignored
                dlogits.scatter_add_(1, target, -counts.to(exact))
                if bias is not None:
                    dbias += dlogits.sum(0)
                dlogits = dlogits.to(dtype)
                dx[rows] = dlogits @ matrix
                if dtype == dweight.dtype:
                    dweight.addmm_(dlogits.T, x_rows)
                else:
                    dweight += dlogits.T @ x_rows
        ctx.save_for_backward(dx, dweight, dbias)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        grads = (None if d is None else d * upstream.to(d.dtype) for d in ctx.saved_tensors)
        return *grads, None, None


def slab_rows(V: int, device: str) -> int:
    """Rows of logits at a time: what stays in a core's cache, or what keeps a GPU busy."""
    logits = 1 << 20 if device == "cpu" else 1 << 27
    return max(256, logits // V)
