"""What a model costs: parameters, bytes and FLOPs; and how many rows a micro-batch has.

    python train.py --size nano                   the embedded corpus, a vocabulary of 4,160

    SIZES["nano"]     4 layers and heads, width 128, rows of 2,048, steps of 8,192 tokens
    parameter_count   1,858,304: embedding and head 532,480 each, the blocks' matrices 786,432,
                      biases and norms 6,912
    state_bytes       (support/optim.py) weights 7.4 MB, gradients 7.4 MB, optimizer state 11.7 MB
    micro_batch_rows  4 rows on a CPU, where a micro-batch has at most 8,192 tokens
    flops_of_step     6 FLOPs per matrix weight and token, and 12 C per pair of tokens in a
                      document and per layer, half of that if attention is causal:
                        blocks     6 x 786,432 x 8,192              38.65 GFLOP
                        attention  6 x 128 x 4 x 2,048^2 x 4 layers 51.54 GFLOP
                        head       6 x 532,480 x 8,192              26.17 GFLOP

These are the FLOPs that the model needs, forward and backward (arXiv 2204.02311, appendix B).
Anything computed a second time, as with --checkpoint-activations, does not count, nor do Muon's
matrix products, nor scores that a mask hides. Padding counts, because it is multiplied. MFU is the
rate of these FLOPs as a share of the peak in the GPU's data sheet. The memory of activations is not
estimated.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from model import Transformer, TransformerConfig
from support.runtime import Runtime
from support.settings import OptimConfig

# ---- parameters


class NothingDrawn(TorchFunctionMode):
    """A mode in which `nn.init.normal_` draws nothing.

    On the meta device there is nothing to draw, but there torch's own `normal_` imports the
    compiler, which takes a second or two.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None) -> object:
        if func is nn.init.normal_:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def empty_model(config: TransformerConfig) -> Transformer:
    """Make a model on the meta device, which has names and shapes but no memory for weights."""
    with torch.device("meta"), NothingDrawn():
        return config.build()


def parameter_count(config: TransformerConfig) -> int:
    """Count the parameters of a model with this config, without allocating them."""
    return sum(p.numel() for p in empty_model(config).parameters())


def parameters_in_words(config: TransformerConfig) -> str:
    """Example: 1.86 M parameters (wte 0.53 M, blocks 0.79 M, ...) with a vocabulary of 4,160"""
    parts: Counter = Counter()
    for name, parameter in empty_model(config).named_parameters():
        part = name.split(".")[0]
        parts["blocks" if part == "h" else part] += parameter.numel()
    shown = {part: f"{count / 1e6:,.2f}" for part, count in parts.items()}
    listed = ", ".join(f"{part} {count} M" for part, count in shown.items() if count != "0.00")
    millions = parts.total() / 1e6
    return f"{millions:,.2f} M parameters ({listed}) with a vocabulary of {config.vocab_size:,}"


# ---- FLOPs


@cache
def block_weight_count(config: TransformerConfig) -> int:
    """Count the weights in a block's matrices, including those of modules that a fork has added."""
    block = empty_model(replace(config, layers=1)).h[0]
    return sum(p.numel() for p in block.parameters() if p.ndim > 1)


def flops_of_step(
    config: TransformerConfig,
    seq_len: int,
    tokens_by_layer: Sequence[int],
    *,
    filled: np.ndarray,
    squares: np.ndarray,
    targets: int,
) -> int:
    """Return the floating-point operations that a step needs, forward and backward, on all ranks.

    We assume that a layer that drops tokens keeps the same share of each document; padding is
    dropped first.

    Args:    seq_len         tokens of a row, with padding
             tokens_by_layer (L,) how many of them each layer sees
             filled          (R,) tokens of each row, without padding
             squares         (R,) the sum of the squared lengths of each row's documents
             targets         how many of their tokens are predicted
    Example: 2 layers of width 4 and MLP 16, V 10, a causal row of 8, half of it in the second
             layer: 6 * 192 * (8 + 4) + 6 * 4 * (8 * 8 + 4 * 4) + 6 * 10 * 4 * 8 == 17664
    """
    C, rows = config.width, len(filled)
    flops = config.head_flops(rows * seq_len, targets)
    for tokens, layers in Counter(tokens_by_layer).items():
        share = np.minimum(filled, tokens) / np.maximum(filled, 1)  # (R,) of each document
        pairs = round((squares * share**2).sum())
        attention = (6 if config.causal else 12) * C * pairs
        flops += layers * (6 * block_weight_count(config) * rows * tokens + attention)
    return flops


# Peak FLOP/s of dense matrix products in 16 bits, by a pattern in torch's name of the GPU; the
# first match counts. From NVIDIA's data sheets, where figures "with sparsity" are halved; for
# GeForce cards from the architectures' white papers.
PEAKS = {
    "B200": 2250e12,
    "(H100|H200) NVL": 835.5e12,
    "GH200|H200|H100.*(HBM3|SXM)": 989.4e12,
    "H100 PCIe": 756e12,
    "A100": 312e12,
    "A10( |$)": 125e12,
    "L40S": 362e12,
    "L4( |$)": 121e12,
    "RTX 4090$": 165.2e12,
    "RTX 3090$": 71e12,
}


def peak_flops(runtime: Runtime) -> float | None:
    """Return the peak FLOP/s of all GPUs, assuming that ranks have the same; None if unknown."""
    if runtime.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(runtime.device)
    for known, peak in PEAKS.items():
        if re.search(known, name):
            tf32 = runtime.dtype == torch.float32  # support/runtime.py switches it on
            return peak * runtime.world_size / (2 if tf32 else 1)
    return None


# ---- the micro-batch

MICRO_BATCH_TOKENS = {"cpu": 8_192, "cuda": 32_768, "mps": 32_768}  # more is no faster


def micro_batch_rows(optim: OptimConfig, seq_len: int, runtime: Runtime, by_document: bool) -> int:
    """Return how many full rows a rank runs through the model together, in one micro-batch.

    By default it is the largest divisor of the rank's share of rows that stays within the device's
    MICRO_BATCH_TOKENS.

    Args:    by_document whether --pack-batch is documents: then a step's rows vary in number and
                         need not divide evenly
    Raises:  ValueError if the rows of --batch-tokens do not divide among ranks and micro-batches
    Example: for 16 rows of 256 on a CPU 16, on 2 ranks 8; for 16 rows of 1,024 it is 8
    """
    rows, ranks = optim.batch_tokens // seq_len, runtime.world_size
    share = rows // ranks
    at_once = optim.micro_batch_size
    if at_once is None:
        most = max(1, min(share, MICRO_BATCH_TOKENS[runtime.device.type] // seq_len))
        at_once = max(n for n in range(1, most + 1) if share % n == 0)
    if rows % (at_once * ranks) and not by_document:
        product = f"ranks {ranks} x --micro-batch-size {at_once} x --seq-len {seq_len}"
        raise ValueError(f"--batch-tokens {optim.batch_tokens} is no multiple of {product}")
    return at_once
