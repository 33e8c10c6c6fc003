"""A GPT or Llama as one Transformer with two seams. No training loop, data or technique.

Seam 1, per-token metadata (`TokenMeta`): attention depends only on `positions` and `doc_ids`, so
    packed rows, padding and dropped tokens need no code here.
Seam 2, `run_block(layer, block, x, meta)`: the layer loop calls each block through this function. A
    technique that skips tokens, offloads weights or checkpoints activations passes its own.

    x = model(*batch.inputs)              hidden states, (B, T, C)
    model.loss(x, batch)                  the sum over the batch's targets, in nats
    model.logits(x)                       scores of every token of the vocabulary, (B, T, V)

In reading order: config, batch, the whole model, block, attention, and the metadata that attention
reads. A BERT (bert.py) has other blocks and heads. Named sizes are in support/settings.py, what
they cost in support/sizes.py.

GPT:   Radford et al. 2019 (GPT-2): pre-LN, learned positions or rotary (2104.09864).
Llama: Touvron et al. 2023 (2302.13971): RMSNorm (1910.07467), SwiGLU (2002.05202), no biases; with
       grouped queries (2305.13245). Each of these is a separate switch, as is QK norm (2010.04245).
All parameters have GPT-2's published names, whatever the model and the flags.

Letters used in the whole repository:
    B rows   T positions   K kept positions   C width   H heads   D head width = C / H
    L layers   V vocabulary   N documents
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.cross_entropy import linear_cross_entropy, product_dtype, token_losses
from kernels.packed_attention import Documents, chosen_impl, index_of, packed_attention
from kernels.rotary import PUBLISHED, Rotary, rotate, rotation
from support.runtime import on_device


@dataclass(frozen=True)
class TransformerConfig:
    """Everything needed to build a model; `build` does."""

    layers: int
    heads: int
    width: int
    mlp_width: int  # width of the MLP's inner layer
    seq_len: int  # tokens in the longest row that it accepts
    vocab_size: int
    pos: str = "learned"  # learned | rope
    dropout: float = 0.0
    norm: str = "layernorm"  # layernorm | rmsnorm
    mlp: str = "gelu"  # gelu | swiglu
    bias: bool = True  # in the blocks' matrices and in LayerNorm
    kv_heads: int | None = None  # key and value heads, shared by groups of queries; None: `heads`
    qk_norm: bool = False  # normalise queries and keys
    rotary: Rotary = PUBLISHED  # with pos rope: base and scaling of the angles
    tied: bool = True  # the token embedding is also the output head
    activation: str | None = None  # gelu_new | gelu; None: as published, see `gelu`

    kind: ClassVar[str] = "gpt"
    causal: ClassVar[bool] = True  # no token sees a later one

    def __post_init__(self) -> None:
        if self.pos not in ("learned", "rope"):
            raise ValueError(f"pos {self.pos}: choose learned or rope")
        if self.norm not in ("layernorm", "rmsnorm"):
            raise ValueError(f"norm {self.norm}: choose layernorm or rmsnorm")
        if self.mlp not in ("gelu", "swiglu"):
            raise ValueError(f"mlp {self.mlp}: choose gelu or swiglu")
        if self.width % self.heads:
            raise ValueError(f"--heads {self.heads} has to divide --width {self.width}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"--kv-heads {self.kv_heads} has to divide --heads {self.heads}")
        if self.pos == "rope" and self.head_width % 2:
            is_odd = f"--width {self.width} / --heads {self.heads} is {self.head_width}"
            raise ValueError(f"--pos rope needs an even head width, but {is_odd}")

    def build(self, kept: Collection[int] | None = None) -> "Transformer":
        return Transformer(self, kept)

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def gelu(self) -> str:
        """`approximate` of nn.GELU: "tanh" if positions are learned, as in GPT-2, else "none".

        `activation` overrides this. On a CPU the exact function is faster.
        """
        published = "gelu_new" if self.pos == "learned" else "gelu"
        return "tanh" if (self.activation or published) == "gelu_new" else "none"

    @property
    def norm_eps(self) -> float:
        return 1e-5  # as published

    def head_flops(self, positions: int, targets: int) -> int:
        """FLOPs of the output matrix, which a GPT applies at every position, padding included."""
        return 6 * self.vocab_size * self.width * positions


@dataclass(frozen=True)
class Batch:
    """The model's input for a step or a micro-batch; the head of data.py shows an example.

    Each field is (B, T) int64, but for `weights`, which is float32.
    """

    tokens: Tensor
    targets: Tensor  # IGNORE where nothing is predicted
    positions: Tensor  # counted from 0 in every piece
    doc_ids: Tensor  # number of the piece, from 0 in every row; -1 for padding
    weights: Tensor | None = None  # of each target in the loss; None: 1 for each
    is_plain: bool = False  # every row is filled by a single piece

    INTEGERS: ClassVar = ("tokens", "targets", "positions", "doc_ids")

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The arguments of `Transformer.forward`. Plain rows need no mask for their documents."""
        if self.is_plain:
            return self.tokens, self.positions[:1], None
        return self.tokens, self.positions, self.doc_ids

    def rows(self, part: slice) -> "Batch":
        parts = {name: getattr(self, name)[part] for name in self.INTEGERS}
        return replace(self, **parts, weights=None if self.weights is None else self.weights[part])

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to a device, all its integers in one transfer."""
        if self.tokens.device.type == device.type:
            return self
        integers = torch.stack([getattr(self, name) for name in self.INTEGERS])
        moved = dict(zip(self.INTEGERS, on_device(integers, device), strict=True))
        weights = None if self.weights is None else on_device(self.weights, device)
        return replace(self, **moved, weights=weights)


BlockRunner = Callable[[int, "Block", Tensor, "TokenMeta"], Tensor]


def run_plain(layer: int, block: "Block", x: Tensor, meta: "TokenMeta") -> Tensor:
    """Run every token through the block: the default `run_block`."""
    return block(x, meta)


def run_recomputed(layer: int, block: "Block", x: Tensor, meta: "TokenMeta") -> Tensor:
    """Do the same in less memory: keep only x, and run the block again in the backward pass."""
    return checkpoint(block, x, meta, use_reentrant=False)


class Transformer(nn.Module):
    """A GPT or Llama: tokens -> hidden states -> loss or logits.

    Args: kept layers whose weights are needed; the others are one block, to be replaced. None: all
    """

    def __init__(self, config: TransformerConfig, kept: Collection[int] | None = None):
        super().__init__()
        self.config = config
        self.run_block: BlockRunner = run_plain  # for calls that pass none
        self.wte = nn.Embedding(config.vocab_size, config.width)
        if config.pos == "learned":
            self.wpe = nn.Embedding(config.seq_len, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h, spare = nn.ModuleList(), None
        for layer in range(config.layers):
            block = self.new_block()  # draws random numbers, also if it is not kept
            if kept is not None and layer not in kept:
                block = spare = spare or block
            self.h.append(block)
        self.ln_f = norm_of(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.add_head()
        self.init_weights()

    def new_block(self) -> "Block":
        return Block(self.config)

    def add_head(self) -> None:
        """Make what stands between hidden states and the output matrix: nothing in a GPT."""

    def init_weights(self) -> None:
        """Draw the weights as GPT-2 does, section 2.3: the residual stream sums 2 L outputs."""
        self.init_modules()
        for block in self.h:
            for out in (block.attn.c_proj, block.mlp.c_proj):
                nn.init.normal_(out.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def init_modules(self) -> None:
        for part in self.children():
            for module in part if part is self.h else [part]:  # a spare block as often as it stands
                module.apply(init_module)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        doc_ids: Tensor | None = None,
        run_block: BlockRunner | None = None,
    ) -> Tensor:
        """Return the last hidden states, (B, T, C), of tokens (B, T).

        Args: positions, doc_ids see `TokenMeta`; None: each row is one document
        """
        T = tokens.shape[1]
        if T > self.config.seq_len:
            raise ValueError(f"a row of {T} tokens is longer than --seq-len {self.config.seq_len}")
        if positions is None:
            positions = torch.arange(T, device=tokens.device)[None]  # (1, T)
        x = self.embed(tokens, positions)  # (B, T, C)
        meta = self.token_meta(x, positions, doc_ids)
        x = self.drop(x)
        run_block = run_block or self.run_block
        for layer, block in enumerate(self.h):
            x = run_block(layer, block, x, meta)
        return self.last_norm(x)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.wte(tokens)  # (B, T, C)
        return x + self.wpe(positions) if self.config.pos == "learned" else x

    def token_meta(self, x: Tensor, positions: Tensor, doc_ids: Tensor | None) -> "TokenMeta":
        """Make what attention reads, once for all layers."""
        config, turns = self.config, None
        if config.pos == "rope":
            dtype = torch.promote_types(x.dtype, torch.float32)
            turns = rotation(positions, config.head_width, dtype, config.rotary)
        return TokenMeta(positions, doc_ids, config.causal, turns, self.attention_impl(x))

    def attention_impl(self, x: Tensor) -> str:
        """Choose how to attend within documents, given the dtype that autocast has now."""
        dropout = self.config.dropout if self.training else 0.0
        compiled = self.h[0]._compiled_call_impl is not None  # set by Module.compile
        dtype = product_dtype(x)
        return chosen_impl(x.device.type, dtype, self.config.head_width, dropout, compiled)

    def last_norm(self, x: Tensor) -> Tensor:
        return self.ln_f(x)

    @property
    def head(self) -> Tensor:
        """The output matrix, (V, C), which turns hidden states into logits."""
        return self.wte.weight if self.config.tied else self.lm_head.weight

    def loss(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the loss of hidden states x (B, T, C), summed over targets, in nats; a scalar."""
        weights = None if batch.weights is None else batch.weights.flatten()
        x = x.flatten(0, 1)  # (B T, C)
        targets = batch.targets.flatten()  # (B T,)
        return linear_cross_entropy(x, self.head, None, targets, target_weights=weights)

    @torch.no_grad()
    def losses(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each target, (B, T), 0 where it is IGNORE; no gradients."""
        losses = token_losses(x.flatten(0, 1), self.head, None, batch.targets.flatten())
        return losses.view(batch.targets.shape)

    def logits(self, x: Tensor) -> Tensor:
        """Return scores of each hidden state's next token, (..., V), for x (..., C)."""
        return F.linear(x, self.head)


def init_module(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Block(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.ln_1 = norm_of(config)
        self.attn = Attention(config)
        self.ln_2 = norm_of(config)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, meta: "TokenMeta") -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x), meta))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        kv_heads = config.kv_heads or config.heads
        self.heads = config.heads, kv_heads, kv_heads  # of queries, keys and values
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.width, sum(self.heads) * config.head_width, config.bias)
        self.c_proj = nn.Linear(config.width, config.width, config.bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_width, config.norm_eps)
            self.k_norm = RMSNorm(config.head_width, config.norm_eps)

    def forward(self, x: Tensor, meta: "TokenMeta") -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, sum(self.heads), C // self.heads[0])
        q, k, v = qkv.split(self.heads, dim=2)  # (B, T, H, D); k and v may have fewer heads
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if meta.rotation is not None:
            q, k = rotate(q, meta.rotation), rotate(k, meta.rotation)
        y = meta.attend(q, k, v, self.dropout if self.training else 0.0)  # (B, T, H, D)
        return self.c_proj(y.reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.gated = config.mlp == "swiglu"
        inner = (2 if self.gated else 1) * config.mlp_width
        self.c_fc = nn.Linear(config.width, inner, config.bias)
        self.gelu = nn.GELU(approximate=config.gelu)
        self.c_proj = nn.Linear(config.mlp_width, config.width, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.c_proj(F.silu(gate) * x)
        return self.c_proj(self.gelu(x))


def norm_of(config: TransformerConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.width, config.norm_eps)
    return nn.LayerNorm(config.width, config.norm_eps, bias=config.bias)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in at least 32 bits, even under autocast, which widens only LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


@dataclass(eq=False)
class TokenMeta:
    """What attention needs to know about each token: its position and the piece it belongs to."""

    positions: Tensor  # (B, T) or (1, T) int64, counted from the start of the token's piece
    # (B, T) int64, equal within a piece, -1 for padding; None: every row is one whole document
    doc_ids: Tensor | None
    causal: bool  # no token sees a later one
    rotation: Tensor | None = None  # (B, T, 1, D/2, 2) cos and sin of the angles, with --pos rope
    impl: str = "dense"  # an implementation in kernels.packed_attention

    def __post_init__(self) -> None:
        self.documents: Documents | None = None  # where the documents lie in the rows
        if self.doc_ids is not None:
            self.documents = index_of(self.doc_ids, self.causal, self.impl)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        """Return the attention output, (B, T, H, D) like q; k and v may have fewer heads."""
        k, v = for_all_heads(k, q.shape[2]), for_all_heads(v, q.shape[2])
        if self.documents is not None:
            return packed_attention(q, k, v, self.documents, dropout)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(*heads_first, dropout_p=dropout, is_causal=self.causal)
        return y.transpose(1, 2)  # (B, T, H, D)

    def of_kept(self, kept: Tensor) -> "TokenMeta":
        """Return the metadata of the kept tokens only; `kept` (B, K) holds their sorted indices.

        Documents are located again, from the doc_ids of the kept tokens. Positions stay those of
        the full row, so rotary angles still show the gaps.
        """
        B, K = kept.shape

        def gather(x: Tensor | None) -> Tensor | None:
            """Gather rows of x.flatten(0, 1), on a CPU several times as fast as elements."""
            if x is None:
                return None
            rows, T, *rest = x.shape
            row = 0 if rows == 1 else torch.arange(B, device=x.device)[:, None]  # (B, 1)
            return x.flatten(0, 1).index_select(0, (kept + T * row).flatten()).view(B, K, *rest)

        doc_ids, turns = gather(self.doc_ids), gather(self.rotation)
        return TokenMeta(gather(self.positions), doc_ids, self.causal, turns, self.impl)


def for_all_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values (B, T, KV, D) for the queries that share them: (B, T, H, D)."""
    KV = x.shape[2]
    return x if KV == heads else x.repeat_interleave(heads // KV, dim=2)
