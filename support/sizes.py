"""Named model sizes: the settings they imply, and what a model costs in bytes and FLOPs.

    python train.py --size nano                   the embedded corpus, a vocabulary of 4,160

    with_defaults     4 layers and heads, width 128, rows of 2,048, steps of 8,192 tokens
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
matrix products, nor scores that a mask hides (on a CPU 8 % of a packed step in rows of 256, none in
rows of 2,048). Padding counts, because it is multiplied. MFU is the rate of these FLOPs as a share
of the peak in the GPU's data sheet. The memory of activations is not estimated: if the device runs
out of memory, train.py says which flag to change.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from model import Transformer, TransformerConfig
from support.optim import OptimConfig
from support.runtime import Runtime
from support.settings import Flat, flag


class Size(NamedTuple):
    layers: int
    heads: int
    width: int
    seq_len: int  # default tokens per row, and the number of learned positions
    tokens: int  # default budget
    batch_tokens: int
    lr: float


# Dimensions. nano: ours. 1.3B: arXiv 2005.14165, table 2.1, but with 16 heads, as in the Data
# Efficiency paper's GPT-3. The others: as published with GPT-2 and BERT.
# Budget, batch and learning rate. nano: measured here (docs/method.md). GPT: GPT-3's batch and
# learning rate (arXiv 2005.14165, table 2.1), and 20 tokens per parameter (arXiv 2203.15556). BERT:
# arXiv 1810.04805.
SIZES = {  # layers, heads, width, seq_len; tokens, batch_tokens, lr
    "nano": Size(4, 4, 128, 2048, 2_200_000, 8_192, 2e-2),
    "124M": Size(12, 12, 768, 1024, 2_500_000_000, 524_288, 6e-4),
    "350M": Size(24, 16, 1024, 1024, 7_000_000_000, 524_288, 3e-4),
    "774M": Size(36, 20, 1280, 1024, 15_500_000_000, 524_288, 2.5e-4),
    "1.3B": Size(24, 16, 2048, 2048, 26_000_000_000, 1_048_576, 2e-4),
    "bert-base": Size(12, 12, 768, 512, 2_200_000_000, 131_072, 1e-4),
    "bert-large": Size(24, 16, 1024, 512, 6_800_000_000, 131_072, 1e-4),
}
BLOCKS = {  # --block -> fields of `TransformerConfig`
    "gpt2": {"norm": "layernorm", "mlp": "gelu", "bias": True},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "bias": False},
}


# ---- settings


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model.

    To add an option, pass it on in config.py's `transformer_config` to model.py's
    `TransformerConfig`; its cost follows from the matrices that it adds.
    """

    model: str = flag("gpt", "gpt predicts the next token, bert masked ones", ("gpt", "bert"))
    size: str = flag("nano", "sets dimensions, budget and learning rate", tuple(SIZES))
    block: str = flag("gpt2", "llama: RMSNorm, SwiGLU, rotary positions, no biases", tuple(BLOCKS))
    qk_norm: bool = flag(False, "RMSNorm on each head's queries and keys")
    kv_heads: int | None = flag(None, "key/value heads (default: --heads)", least=1, most=4096)
    pos: str | None = flag(
        None, "positions (default: rope for nano and llama, else learned)", ("learned", "rope")
    )
    rope_theta: float = flag(10_000.0, "base of the rotary angles", hidden=True)
    rope_scaling: str | None = flag(None, "Llama 3.1's, factor:slow:fast:positions", hidden=True)
    tied: bool | None = flag(None, "tie output head and embedding (default: on, except nano GPT)")
    layers: int | None = flag(None, "number of blocks (default: by --size)", least=1, most=4096)
    heads: int | None = flag(None, "attention heads (default: by --size)", least=1, most=4096)
    width: int | None = flag(None, "hidden size (default: by --size)", least=1, most=2**17)
    mlp_width: int | None = flag(None, "of the MLP: 4 x --width, for llama 8/3", hidden=True)
    # gelu_new is GPT-2's approximation, gelu is exact; None: by --pos
    activation: str | None = flag(None, "GELU", ("gelu_new", "gelu"), hidden=True)
    dropout: float = flag(0.0, "share of activations zeroed in training", least=0, below=1)
    nsp: bool = flag(False, "BERT also learns whether two texts follow each other")
    init: str | None = flag(None, "start from the weights of a run, or of GPT-2, BERT or Llama")


def with_defaults(settings: Flat) -> Flat:
    """Fill in the settings that follow from --size or from other settings."""
    s = {name: value for name, value in settings.items() if value is not None}
    name = s.setdefault("model.size", "nano")
    size = SIZES[name]
    s.setdefault("model.layers", size.layers)
    s.setdefault("model.heads", size.heads)
    s.setdefault("model.width", size.width)
    is_llama, width = s.get("model.block") == "llama", s["model.width"]
    s.setdefault("model.kv_heads", s["model.heads"])
    s.setdefault("model.mlp_width", swiglu_width(width) if is_llama else 4 * width)
    new_nano = name == "nano" and "model.init" not in s
    s.setdefault("model.pos", "rope" if is_llama or new_nano else "learned")
    is_bert = s.get("model.model") == "bert"
    s.setdefault("model.tied", not new_nano or is_bert)
    # A BERT's documents are padded unless packed: its rows are as long as the published ones.
    T = s.setdefault("data.seq_len", min(size.seq_len, 512) if is_bert else size.seq_len)
    s.setdefault("optim.tokens", size.tokens)
    s.setdefault("optim.schedule_tokens", s["optim.tokens"])
    s.setdefault("optim.batch_tokens", max(size.batch_tokens // T, 1) * T)
    s.setdefault("optim.lr", size.lr)
    # Published values for BERT and for GPT (GPT-3, appendix B); measured here for a nano GPT. With
    # --init the size is known if it names a run, and may be missing for published weights.
    is_nano = new_nano or settings.get("model.size") == "nano"
    s.setdefault("optim.beta2", 0.999 if is_bert else 0.99 if is_nano else 0.95)
    s.setdefault("optim.warmup_tokens", s["optim.tokens"] // 50)
    s.setdefault("run.eval_every", max(s["optim.tokens"] // 5, 1))
    s.setdefault("run.checkpoint_every", max(s["optim.tokens"] // 10, 1))
    return s


def usual_lr(settings: Flat) -> float:
    """Return the learning rate of the --size that is nearest in width, among GPTs or BERTs."""
    width, is_bert = with_defaults(settings)["model.width"], settings.get("model.model") == "bert"
    alike = [name for name in SIZES if name == "nano" or name.startswith("bert") == is_bert]
    return SIZES[min(alike, key=lambda name: abs(SIZES[name].width - width))].lr


def swiglu_width(width: int) -> int:
    """Return 2/3 of 4 C, rounded up as Llama does: then the gate adds no weights."""
    multiple = 64 if width <= 1024 else 256
    return -(-8 * width // (3 * multiple)) * multiple


# ---- parameters


class NothingDrawn(TorchFunctionMode):
    """A mode in which `nn.init.normal_` draws nothing.

    On the meta device there is nothing to draw, but torch imports its compiler to find that out,
    which takes a second.
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
    """Example: 1.66 M parameters (wte 0.53 M, blocks 0.59 M, lm_head 0.53 M) with a vocabulary
    of 4,160
    """
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
def weights_of_block(config: TransformerConfig) -> int:
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
        flops += layers * (6 * weights_of_block(config) * rows * tokens + attention)
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
    peak = next((peak for known, peak in PEAKS.items() if re.search(known, name)), None)
    if peak and runtime.dtype == torch.float32:
        peak /= 2  # TF32, which support/runtime.py switches on
    return peak and peak * runtime.world_size


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
        divisors = [n for n in range(1, most + 1) if share % n == 0]
        at_once = divisors[-1] if share else most
    if rows % (at_once * ranks) and not by_document:
        product = f"ranks {ranks} x --micro-batch-size {at_once} x --seq-len {seq_len}"
        raise ValueError(f"--batch-tokens {optim.batch_tokens} is no multiple of {product}")
    return at_once
