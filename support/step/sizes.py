"""The settings of a model, its sizes by name, the defaults that follow from them, and its cost."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from kernels.rotary import rotation
from model import TokenMeta, Transformer, TransformerConfig, for_all_heads
from support.settings import Flat, flag


class Size(NamedTuple):
    layers: int
    heads: int
    width: int
    seq_len: int  # tokens of the longest row
    tokens: int  # of the budget
    batch_tokens: int
    lr: float


# Dimensions. nano: ours. 1.3B: arXiv 2005.14165, table 2.1, with 16 heads as in the Data Efficiency
# paper's GPT-3. The others are as published with GPT-2 and BERT.
# Budget, batch and learning rate. nano: measured here (docs/method.md). GPT: GPT-3's batch and
# learning rate (arXiv 2005.14165, table 2.1), 20 tokens a parameter (arXiv 2203.15556); BERT:
# arXiv 1810.04805.
SIZES = {  # layers, heads, width, seq_len; tokens, batch_tokens, lr
    "nano": Size(3, 4, 128, 256, 2_000_000, 4_096, 2e-2),
    "124M": Size(12, 12, 768, 1024, 2_500_000_000, 524_288, 6e-4),
    "350M": Size(24, 16, 1024, 1024, 7_000_000_000, 524_288, 3e-4),
    "774M": Size(36, 20, 1280, 1024, 15_500_000_000, 524_288, 2.5e-4),
    "1.3B": Size(24, 16, 2048, 2048, 26_000_000_000, 1_048_576, 2e-4),
    "bert-base": Size(12, 12, 768, 512, 2_200_000_000, 131_072, 1e-4),
    "bert-large": Size(24, 16, 1024, 512, 6_800_000_000, 131_072, 1e-4),
}


# ---- settings


@dataclass(frozen=True)
class ModelConfig:
    """What decides a model. A new option goes on through config.py's `transformer_config` to
    model.py's `TransformerConfig`; what it costs is counted from the modules, see `counted`.
    """

    model: str = flag(
        "gpt", "gpt reads from left to right, bert fills in masked tokens", ("gpt", "bert")
    )
    size: str = flag("nano", "by name: see support/step/sizes.py", tuple(SIZES))
    block: str = flag(
        "gpt2", "llama: RMSNorm, SwiGLU, rotary positions, no biases", ("gpt2", "llama")
    )
    qk_norm: bool = flag(False, "norm queries and keys")
    kv_heads: int | None = flag(
        None, "heads of keys and values (default: as many as --heads)", least=1, most=4096
    )
    pos: str | None = flag(
        None, "positions (default: rope for nano and llama, else learned)", ("learned", "rope")
    )
    rope_theta: float = flag(10_000.0, "base of the rotary angles", least=1)
    rope_scaling: str | None = flag(
        None, "Llama 3.1's slower rotary angles, as factor:slow:fast:positions"
    )
    tied: bool | None = flag(
        None, "the embedding predicts too, not a matrix of its own (default: but for a nano GPT)"
    )
    layers: int | None = flag(None, "number of blocks (default: by --size)", least=1, most=4096)
    heads: int | None = flag(None, "attention heads (default: by --size)", least=1, most=4096)
    width: int | None = flag(
        None, "width of the residual stream (default: by --size)", least=1, most=2**17
    )
    mlp_width: int | None = flag(
        None, "inner width of the MLP (default: 4 x --width; llama 8/3)", least=1, most=2**19
    )
    dropout: float = flag(0.0, "share of activations zeroed in training", least=0, below=1)
    nsp: bool = flag(False, "a BERT is trained on pairs: does the second text follow the first?")
    init: str | None = flag(
        None, "start from the weights of a run, or published ones (GPT-2, BERT, Llama)"
    )


def with_defaults(settings: Flat) -> Flat:
    """Fill in what was left to --size, and what follows from other settings."""
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
    s.setdefault("data.seq_len", size.seq_len)
    s.setdefault("optim.tokens", size.tokens)
    s.setdefault("optim.schedule_tokens", s["optim.tokens"])
    s.setdefault("optim.batch_tokens", max(size.batch_tokens, s["data.seq_len"]))
    s.setdefault("optim.lr", size.lr)
    # BERT's and GPT-3's (appendix B) are as published; for nano both were measured here
    s.setdefault("optim.beta2", 0.999 if is_bert else 0.99 if new_nano else 0.95)
    s.setdefault("optim.warmup_tokens", s["optim.tokens"] // 50)
    s.setdefault("run.eval_every", max(s["optim.tokens"] // 5, 1))
    s.setdefault("run.checkpoint_every", max(s["optim.tokens"] // 10, 1))
    return s


def of_block(block: str) -> dict[str, Any]:
    """What --block says of a `TransformerConfig`."""
    if block == "llama":
        return {"norm": "rmsnorm", "mlp": "swiglu", "bias": False}
    return {"norm": "layernorm", "mlp": "gelu", "bias": True}


def swiglu_width(width: int) -> int:
    """2/3 of 4 C, for as many weights as without a gate, rounded up as Llama does."""
    multiple = 64 if width <= 1024 else 256
    return -(-8 * width // (3 * multiple)) * multiple


# ---- parameters and cost


class NothingDrawn(TorchFunctionMode):
    """Skips drawing normal random values. The meta device draws none anyway, but to find that out
    torch imports its compiler, which takes a second.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func is nn.init.normal_:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def empty_model(config: TransformerConfig) -> Transformer:
    """A model without memory: its names and shapes, for weights that are still to come."""
    with torch.device("meta"), NothingDrawn():
        return Transformer(config)


def parameter_count(config: TransformerConfig) -> int:
    """Parameters of a model of this config, counted without taking memory for them."""
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


class Counted(NamedTuple):
    """What a token costs in one block, without attention's scores, and in the head."""

    block: int  # FLOPs, forward
    again: int  # those of them that a block repeats if only its input is kept
    head: int  # FLOPs of a prediction, forward
    answer: int  # FLOPs of telling whether a pair's second part follows; 0 without --nsp
    kept: int  # bytes that autograd keeps of a block until the backward pass


class StandIn(torch.autograd.Function):
    """In place of attention's kernels, which differ from device to device and keep the same.

    That is queries, keys, values, output, and in float32 the log of the sum of each head's weights.
    Their FLOPs are counted in support/step/flops.py.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, y, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return y


class Uncomputed(TokenMeta):
    """Metadata of tokens whose attention is not computed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        return StandIn.apply(q, *(for_all_heads(x, q.shape[2]) for x in (k, v)))


@cache
def counted(config: TransformerConfig, half: bool) -> Counted:
    """Run a block and the head of the real model without computing, and watch what they do.

    So a module that a fork adds to the block is counted too. The cost of a token is that of a row
    of `config.seq_len` tokens, divided by these: taken to be the same in shorter rows.

    Args: half whether matrix products are of 16 bits
    Cost: 40 ms, once in a process; 0.2 s with `half`, for torch to set up its fake tensors, which
          have autocast where those of the meta device have none
    """
    T, one = config.seq_len, replace(config, layers=1)
    kept: dict[int, torch.UntypedStorage] = {}
    ends: list[int] = []  # FLOPs until something was kept

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        ends.append(counter.get_total_flops())
        return tensor

    def of_rows(rows: int) -> tuple[int, int, int]:
        """FLOPs of a block, FLOPs until it kept the last thing, and bytes that it kept."""
        kept.clear()
        before = counter.get_total_flops()
        x = torch.empty(rows, T, config.width, requires_grad=True)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model.h[0](x, meta)
        numbers = counter.get_total_flops() - before, ends[-1] - before
        return *numbers, sum(storage.nbytes() for storage in kept.values())

    def of_head(work: Callable[[], Tensor]) -> int:
        before = counter.get_total_flops()
        work()
        return counter.get_total_flops() - before

    with ExitStack() as around:
        for context in (
            FakeTensorMode() if half else nullcontext(),
            torch.device("cpu" if half else "meta"),
            torch.autocast("cpu", torch.bfloat16, enabled=half),
            NothingDrawn(),
            counter := FlopCounterMode(display=False),
        ):
            around.enter_context(context)
        model, positions = Transformer(one), torch.empty(1, T, dtype=torch.int64)
        turns = rotation(positions, config.head_width) if config.pos == "rope" else None
        meta = Uncomputed(positions, None, config.causal, turns)
        # the second row's cost alone: weights, casts of them and angles are there once for all rows
        block, again, size = (two - one for two, one in zip(of_rows(2), of_rows(1), strict=True))
        x = torch.empty(1, config.width)
        head = of_head(lambda: F.linear(model.features(x)[0], model.head))
        first = torch.zeros(1, dtype=torch.int64)
        answer = of_head(lambda: model.follows(x, first)) if config.nsp else 0
    return Counted(block // T, again // T, head, answer, size // T)


def matrices_of_block(config: TransformerConfig) -> dict[str, nn.Parameter]:
    """Those of a block without memory, by name: what multiplies, and what Muon updates."""
    block = empty_model(replace(config, layers=1)).h[0]
    return {name: p for name, p in block.named_parameters() if p.ndim > 1}


def weights_of_block(config: TransformerConfig) -> int:
    """Weights in the matrices of a block: those that multiply."""
    return sum(matrix.numel() for matrix in matrices_of_block(config).values())


def flops_of_row(config: TransformerConfig, tokens_by_layer: Sequence[int], T: int) -> int:
    """Floating-point operations of one training row; the backward pass is 2/3.

    6 per token and weight that multiplies (the head counts, looking up embeddings does not),
    and 12 C K for the two products of attention of each of K tokens, halved for causal attention.
    arXiv 2204.02311, appendix B, except for that half.

    Args:    tokens_by_layer (L,) how many of the row's T tokens each layer sees
    Example: 2 layers of width 4 and MLP 16, V 10, a causal row of 8, half of it in the second
             layer: 6 * 192 * (8 + 4) + 6 * 4 * (8 * 8 + 4 * 4) + 6 * 10 * 4 * 8 == 17664
    """
    C, of_token = config.width, counted(config, half=False)
    attention = 6 * C if config.causal else 12 * C
    blocks = sum(3 * of_token.block * K + attention * K * K for K in tokens_by_layer)
    return blocks + 6 * config.vocab_size * C * T
