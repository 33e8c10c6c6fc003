"""GPT, Llama and BERT as one Transformer with two seams. No training loop, data or technique.

Seam 1, per-token metadata (`TokenMeta`): attention depends only on `positions` and `doc_ids`, so
    packed rows, padding and dropped tokens need no code here.
Seam 2, `run_block(layer, block, x, meta)`: the layer loop calls each block through this function. A
    technique that skips tokens, offloads weights or checkpoints activations passes its own.

In reading order: config, batch, attention, block, the whole model, and the metadata that attention
reads. Named sizes and their costs are in support/sizes.py.

GPT:  Radford et al. 2019 (GPT-2): pre-LN, learned positions or rotary (2104.09864).
Llama: Touvron et al. 2023 (2302.13971): RMSNorm (1910.07467), SwiGLU (2002.05202), no biases; with
    grouped queries (2305.13245). Each of these is a separate switch, as is QK norm (2010.04245).
BERT: Devlin et al. 2018 (arXiv 1810.04805): post-LN, bidirectional, masked-token head, no segments.
All parameters have GPT-2's published names, whatever the model and the flags.

Letters used in the whole repository:
    B rows   T positions   K kept positions   C width   H heads   D head width = C / H
    L layers   V vocabulary   N documents
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.cross_entropy import IGNORE, linear_cross_entropy, product_dtype, token_losses
from kernels.packed_attention import Documents, chosen_impl, index_of, packed_attention
from kernels.rotary import PUBLISHED, Rotary, rotate, rotation
from support.runtime import on_device


@dataclass(frozen=True)
class TransformerConfig:
    """Everything needed to build a model."""

    kind: str  # gpt | bert
    layers: int
    heads: int
    width: int
    mlp_width: int  # width of the MLP's inner layer
    seq_len: int  # tokens in the longest row that it accepts
    vocab_size: int
    pos: str = "learned"  # learned | rope
    dropout: float = 0.0
    nsp: bool = False  # a BERT also predicts whether the second part of a pair follows the first
    norm: str = "layernorm"  # layernorm | rmsnorm
    mlp: str = "gelu"  # gelu | swiglu
    bias: bool = True  # in the blocks' matrices and in LayerNorm
    kv_heads: int | None = None  # key and value heads, shared by groups of queries; None: `heads`
    qk_norm: bool = False  # normalise queries and keys
    rotary: Rotary = PUBLISHED  # with pos rope: base and scaling of the angles
    tied: bool = True  # the token embedding is also the output head
    activation: str | None = None  # gelu_new | gelu; None: see `gelu` below

    def __post_init__(self) -> None:
        if self.kind not in ("gpt", "bert"):
            raise ValueError(f"--model {self.kind}: choose gpt or bert")
        if self.width % self.heads:
            raise ValueError(f"--heads {self.heads} has to divide --width {self.width}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"--kv-heads {self.kv_heads} has to divide --heads {self.heads}")
        if self.pos == "rope" and self.head_width % 2:
            raise ValueError(
                f"--pos rope rotates pairs of numbers, but a head is {self.head_width} wide:"
                " choose --width and --heads that give an even head width"
            )

    @property
    def causal(self) -> bool:
        return self.kind == "gpt"

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        """How many heads queries, keys and values have."""
        kv_heads = self.kv_heads or self.heads
        return self.heads, kv_heads, kv_heads

    @property
    def gelu(self) -> str:
        """`approximate` of nn.GELU: "tanh" for a GPT with learned positions, else "none".

        `activation` overrides this. GPT-2's weights, which have learned positions, were trained
        with the tanh approximation. On a CPU the exact function takes 0.4 times as long
        (docs/step.md).
        """
        published = "gelu_new" if self.kind == "gpt" and self.pos == "learned" else "gelu"
        return "tanh" if (self.activation or published) == "gelu_new" else "none"

    @property
    def norm_eps(self) -> float:
        return 1e-12 if self.kind == "bert" and self.norm == "layernorm" else 1e-5  # as published


class RMSNorm(nn.RMSNorm):
    """RMSNorm in at least 32 bits, even under autocast, which widens only LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


def norm_of(config: TransformerConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.width, config.norm_eps)
    if config.norm != "layernorm":
        raise ValueError(f"norm {config.norm}: choose layernorm or rmsnorm")
    return nn.LayerNorm(config.width, config.norm_eps, bias=config.bias)


class Batch(NamedTuple):
    """The model's input for a step or a micro-batch. Each field is (B, T) int64.

    Made by data.batch_of; the head of data.py shows an example. `positions` and `doc_ids` are None
    if every row is filled by a single piece.
    """

    tokens: Tensor
    targets: Tensor  # IGNORE where nothing is predicted
    positions: Tensor | None  # counted from 0 in every piece
    doc_ids: Tensor | None  # number of the piece, from 0 in every row; -1 for padding

    def rows(self, part: slice) -> "Batch":
        return Batch(*(None if field is None else field[part] for field in self))

    def with_documents(self) -> "Batch":
        """Fill in positions and doc_ids if they are None because every row is a single piece."""
        if self.doc_ids is not None:
            return self
        rows, T = self.tokens.shape
        positions = torch.arange(T, device=self.tokens.device).repeat(rows, 1)  # (B, T)
        return self._replace(positions=positions, doc_ids=torch.zeros_like(positions))

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to a device, all fields in one transfer."""
        if self.tokens.device.type == device.type:
            return self
        fields = on_device(torch.stack([f for f in self if f is not None]), device)  # (n, B, T)
        return Batch(*fields, *[None] * (len(self) - len(fields)))


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.heads, self.dropout = config.qkv_heads, config.dropout
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
        if config.mlp not in ("gelu", "swiglu"):
            raise ValueError(f"mlp {config.mlp}: choose gelu or swiglu")
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


class Block(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.pre_norm = config.kind == "gpt"
        self.ln_1 = norm_of(config)
        self.attn = Attention(config)
        self.ln_2 = norm_of(config)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, meta: "TokenMeta") -> Tensor:
        if self.pre_norm:
            x = x + self.drop(self.attn(self.ln_1(x), meta))
            return x + self.drop(self.mlp(self.ln_2(x)))
        x = self.ln_1(x + self.drop(self.attn(x, meta)))
        return self.ln_2(x + self.drop(self.mlp(x)))


BlockRunner = Callable[[int, Block, Tensor, "TokenMeta"], Tensor]


def run_plain(layer: int, block: Block, x: Tensor, meta: "TokenMeta") -> Tensor:
    """Run every token through the block: the default `run_block`."""
    return block(x, meta)


def run_recomputed(layer: int, block: Block, x: Tensor, meta: "TokenMeta") -> Tensor:
    """Do the same in less memory: keep only x, and run the block again in the backward pass."""
    return checkpoint(block, x, meta, use_reentrant=False)


class Transformer(nn.Module):
    """A GPT, Llama or BERT.

    `model(batch)` returns the summed loss, `model.losses(batch)` the loss of each target, and
    `model.logits(tokens)` the scores of every token of the vocabulary.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.run_block: BlockRunner = run_plain  # for calls that pass none
        self.wte = nn.Embedding(config.vocab_size, config.width)
        if config.pos == "learned":
            self.wpe = nn.Embedding(config.seq_len, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        # The one norm outside the blocks: a pre-LN stack ends with it, a post-LN stack starts with
        # it.
        self.ln_f = norm_of(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.kind == "bert":
            self.mlm = nn.Linear(config.width, config.width)
            self.mlm_ln = norm_of(config)
            self.mlm_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.apply(self._init)
        if config.kind == "gpt":  # GPT-2, section 2.3: the residual stream sums 2 L outputs
            for block in self.h:
                for out in (block.attn.c_proj, block.mlp.c_proj):
                    nn.init.normal_(out.weight, std=0.02 / math.sqrt(2 * config.layers))
        if config.nsp:  # last, so that --nsp does not change the initial values of other weights
            self.pooler = nn.Linear(config.width, config.width)
            self.nsp = nn.Linear(config.width, 2)
            self._init(self.pooler)
            self._init(self.nsp)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        doc_ids: Tensor | None = None,
        run_block: BlockRunner | None = None,
    ) -> Tensor:
        """Return the last layer's output, (B, T, C), for tokens (B, T).

        `TokenMeta` explains positions and doc_ids.
        """
        _, T = tokens.shape
        config = self.config
        if T > config.seq_len:
            raise ValueError(f"a row of {T} tokens is longer than --seq-len {config.seq_len}")
        if positions is None:
            positions = torch.arange(T, device=tokens.device)[None]  # (1, T)
        x = self.wte(tokens)  # (B, T, C)
        turns = None
        if config.pos == "learned":
            x = x + self.wpe(positions)
        elif config.pos == "rope":
            dtype = torch.promote_types(x.dtype, torch.float32)
            turns = rotation(positions, config.head_width, dtype, config.rotary)
        else:
            raise ValueError(f"--pos {config.pos}: choose learned or rope")
        meta = TokenMeta(positions, doc_ids, config.causal, turns, self.attention_impl(x))
        if config.kind == "bert":
            x = self.ln_f(x)
        x = self.drop(x)
        run_block = run_block or self.run_block
        for layer, block in enumerate(self.h):
            x = run_block(layer, block, x, meta)
        return self.ln_f(x) if config.kind == "gpt" else x

    def attention_impl(self, x: Tensor) -> str:
        """Choose how to attend within documents, given the dtype that autocast has now."""
        dropout = self.config.dropout if self.training else 0.0
        compiled = self.h[0]._compiled_call_impl is not None  # set by Module.compile
        dtype = product_dtype(x)
        return chosen_impl(x.device.type, dtype, self.config.head_width, dropout, compiled)

    def logits(self, *inputs, **more) -> Tensor:
        """Return (B, T, V) scores for the next token, or for BERT's masked one.

        The arguments are those of `hidden_states`.
        """
        features, bias = self.features(self.hidden_states(*inputs, **more))
        return F.linear(features, self.head, bias)

    @property
    def head(self) -> Tensor:
        """The output matrix, (V, C), which turns features into logits."""
        return self.wte.weight if self.config.tied else self.lm_head.weight

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the output matrix, and the bias of the logits, if any (BERT)."""
        if self.config.kind == "gpt":
            return x, None
        return self.mlm_ln(F.gelu(self.mlm(x))), self.mlm_bias

    def forward(
        self,
        batch,
        run_block: BlockRunner | None = None,
        shares: Tensor | None = None,
        predicted: "Predicted | None" = None,
    ) -> Tensor:
        """Return the loss in nats, summed over the targets that are not IGNORE; a scalar.

        Args: shares    (B, T) weight of each target in the sum; None for 1
              predicted positions of the targets that are not IGNORE; None finds them in `batch`,
                        which makes the host wait for the GPU
        """
        tokens, targets, positions, doc_ids = batch
        x = self.hidden_states(tokens, positions, doc_ids, run_block).flatten(0, 1)  # (B T, C)
        at, answers = predicted or self.predicted(targets, positions)
        targets = targets.flatten()  # (B T,)
        shares = None if shares is None else shares.flatten()  # (B T,)
        features, bias = self.features(rows_at(x, at))
        loss = linear_cross_entropy(
            features, self.head, bias, rows_at(targets, at), shares=rows_at(shares, at)
        )
        if answers is not None:
            scores = self.follows(x, answers).to(loss.dtype)
            losses = F.cross_entropy(scores, rows_at(targets, answers), reduction="none")
            loss = loss + (losses if shares is None else losses * rows_at(shares, answers)).sum()
        return loss

    @torch.no_grad()
    def losses(self, batch) -> Tensor:
        """Return the loss of each target in nats, (B, T), 0 where it is IGNORE; no gradients."""
        tokens, targets, positions, doc_ids = batch
        x = self.hidden_states(tokens, positions, doc_ids).flatten(0, 1)  # (B T, C)
        at = self.predicted(targets, positions).tokens
        features, bias = self.features(rows_at(x, at))
        flat = targets.flatten()  # (B T,)
        losses = token_losses(features, self.head, bias, rows_at(flat, at))  # (n,)
        if at is not None:
            losses = losses.new_zeros(len(flat)).index_copy(0, at, losses)
        return losses.view(targets.shape)  # (B, T)

    def predicted(self, targets: Tensor, positions: Tensor | None) -> "Predicted":
        if self.config.kind == "gpt":
            return Predicted(None, None)
        return predicted_by_bert(targets, positions, self.config.nsp)

    def follows(self, x: Tensor, answers: Tensor) -> Tensor:
        """Score whether the second part of each pair follows the first: (n, 2), yes and no.

        Args: x       (B T, C) the last layer's output
              answers (n,) int64, rows of x that belong to a [CLS], the first token of a pair
        """
        return self.nsp(torch.tanh(self.pooler(rows_at(x, answers))))


class Predicted(NamedTuple):
    """The positions, of the (B T,) in a batch, at which the model predicts something; sorted.

    Their number decides shapes. If the GPU counted them, the host would have to wait until the GPU
    has finished all its queued work, so plan.py finds them on the host, before the batch is sent.
    """

    # (n,) int64; None: all positions. At all of them, the head would be a fifth of a BERT's work.
    tokens: Tensor | None
    answers: Tensor | None  # (m,) int64, each [CLS] that predicts whether its pair belongs together

    def to(self, device: torch.device) -> "Predicted":
        return Predicted(*(at if at is None else on_device(at, device) for at in self))

    def rows(self, part: slice, T: int) -> "Predicted":
        """Select the positions in some of the rows, counted from the first of these rows."""
        ends = torch.tensor([part.start * T, part.stop * T])

        def cut(at: Tensor | None) -> Tensor | None:
            return at if at is None else at[slice(*torch.searchsorted(at, ends))] - ends[0]

        return Predicted(cut(self.tokens), cut(self.answers))


def predicted_by_bert(targets: Tensor, positions: Tensor | None, nsp: bool) -> Predicted:
    """Find the targets of a BERT, given (B, T) targets and positions; `nsp` separates answers."""
    counts = targets != IGNORE  # (B, T)
    if not nsp:
        return Predicted(counts.flatten().nonzero().squeeze(1), None)
    if positions is None:  # every row is one document
        positions = torch.arange(targets.shape[1], device=targets.device)[None]  # (1, T)
    at = (counts & (positions != 0), counts & (positions == 0))
    return Predicted(*(where.flatten().nonzero().squeeze(1) for where in at))


def for_all_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values (B, T, KV, D) for the queries that share them: (B, T, H, D)."""
    KV = x.shape[2]
    return x if KV == heads else x.repeat_interleave(heads // KV, dim=2)


def rows_at(x: Tensor | None, at: Tensor | None) -> Tensor | None:
    return x if x is None or at is None else x.index_select(0, at)


@dataclass(eq=False)
class TokenMeta:
    """What attention needs to know about each token: its position and the piece it belongs to."""

    positions: Tensor  # (B, T) or (1, T) int64, counted from the start of the token's piece
    # (B, T) int64, equal within a piece, -1 for padding; None: every row is one whole document
    doc_ids: Tensor | None
    causal: bool  # no token sees a later one
    rotation: Tensor | None = None  # (B, T, 1, D/2, 2) cos and sin of the angles, with --pos rope
    impl: str = "dense"  # an implementation in kernels.packed_attention
    documents: Documents | None = None  # where the documents lie; None: computed from doc_ids

    def __post_init__(self) -> None:
        if self.doc_ids is not None and self.documents is None:
            self.documents = index_of(self.doc_ids, self.causal, self.impl)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        """Return the attention output, (B, T, H, D) like q; k and v may have fewer heads."""
        k, v = for_all_heads(k, q.shape[2]), for_all_heads(v, q.shape[2])
        if self.documents is not None:
            return packed_attention(q, k, v, self.documents, dropout)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(*heads_first, dropout_p=dropout, is_causal=self.causal)
        return y.transpose(1, 2)  # (B, T, H, D)

    def take(self, kept: Tensor) -> "TokenMeta":
        """Return the metadata of the kept tokens only; `kept` (B, K) holds their sorted indices.

        Documents are located again, from the doc_ids of the kept tokens. Positions stay those of
        the full row, so rotary angles still show the gaps. `kept` may have n B rows: n selections,
        one after the other, each from all B rows.
        """
        rows, K = kept.shape

        def of_kept(x: Tensor | None) -> Tensor | None:
            """Gather rows of x.flatten(0, 1), on a CPU several times as fast as elements."""
            if x is None:
                return None
            B, T, *rest = x.shape
            row = 0 if B == 1 else torch.arange(rows, device=x.device)[:, None] % B  # (rows, 1)
            return x.flatten(0, 1).index_select(0, (kept + T * row).flatten()).view(rows, K, *rest)

        doc_ids, turns = of_kept(self.doc_ids), of_kept(self.rotation)
        return TokenMeta(of_kept(self.positions), doc_ids, self.causal, turns, self.impl)

    def take_each(self, kept: Sequence[Tensor]) -> list["TokenMeta"]:
        """Call `take` for each of n layers that keep the same number of tokens.

        `take` runs about twenty operators, however many rows there are, so on a GPU one call serves
        all layers. On a CPU each layer gets its own call, because attention there computes
        documents of similar length together, and does so for each layer by itself.
        """
        if self.positions.device.type == "cpu":
            return [self.take(one) for one in kept]
        n, of_all = len(kept), self.take(torch.cat(list(kept)))

        def parts(x: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * n if x is None else x.chunk(n)

        documents = [None] * n
        if of_all.documents:
            indices = zip(*(x.chunk(n) for x in of_all.documents.index), strict=True)
            documents = [of_all.documents._replace(index=index) for index in indices]
        fields = (parts(of_all.positions), parts(of_all.doc_ids), parts(of_all.rotation), documents)
        return [
            TokenMeta(positions, doc_ids, self.causal, turns, self.impl, index)
            for positions, doc_ids, turns, index in zip(*fields, strict=True)
        ]
