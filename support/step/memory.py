"""What a run takes of memory, before it is there: by kind, and against what the device has free.

Weights, gradients and optimizer state are counted exactly. Activations are what autograd keeps of
each block, read off model.py line by line. Added to these is the most that one moment of a step
needs for a while: the logits, or the end of the backward pass, or Muon's step. A GPU's workspaces
and what an allocator cannot use again are not counted, nor the text, which is mapped.
"""

import os
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from kernels.cross_entropy import chosen_impl as chosen_loss
from kernels.cross_entropy import chunk_rows
from kernels.packed_attention import chosen_impl
from model import TransformerConfig
from support.base.runtime import Runtime
from support.step.optim import split_parameters
from support.step.placement import Away, Placement, ShardedPlacement, parts_of
from support.step.sizes import empty_model

# Bytes of torch's own code that a CPU's first step brings into memory (12 x 256 and smaller).
CODE_OF_A_STEP = 130_000_000


class Memory(NamedTuple):
    """Bytes that a rank takes at the most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # of one micro-batch
    logits: int  # some rows at once, and what the loss keeps of them, its gradients
    temporary: (
        int  # else for a while: copies in half precision, a block's backward, Muon's products
    )
    torch: int  # its own code, which a CPU's first step brings into memory
    away: int  # of the first three, what --offload keeps on the host and not on the device

    @property
    def on_device(self) -> int:
        """What has to be free before any of it is there."""
        return sum(self) - 2 * self.away


def state_bytes(model: nn.Module, optimizer: str, shards: int = 1) -> dict[str, int]:
    """As Optimizers.memory has it, of a model that may be on the meta device.

    Args: shards ranks that share each parameter's rows (--fsdp)
    """

    def of(*groups: list[nn.Parameter]) -> int:
        parameters = [p for group in groups for p in group]
        return sum(-(-len(p) // shards) * (p.nbytes // len(p)) for p in parameters)

    parts = split_parameters(dict(model.named_parameters()), optimizer == "muon")
    momenta, others = of(parts.fused, parts.matrices), of(parts.decayed, parts.plain)
    weights = momenta + others
    return {"weights": weights, "gradients": weights, "optimizer": momenta + 2 * others}


def activation_bytes(
    config: TransformerConfig,
    rows: int,
    T: int,
    half: bool = False,
    isolated: bool = False,
    masked: bool = False,
    recomputed: bool = False,
) -> int:
    """What autograd keeps of full rows until the backward pass, if nothing is dropped.

    Args: half       whether matrix products are of 16 bits
          isolated   whether rows hold several documents, or padding
          masked     whether these are told apart by a mask of (T, T)
          recomputed whether a block keeps its input alone, but for one block at a time
    Example: of a token, a block of width C and MLP 4 C keeps 16 C numbers in fp32: what its norms
             got and returned (4 C), queries, keys and values (3 C), attention's output (C), and
             what GELU got and returned (8 C)
    """
    C, size = config.width, 2 if half else 4
    turned = 2 * C if config.pos == "rope" else 0  # queries and keys once more
    block = 2 * 4 * C + size * (6 * C + turned + 2 * config.mlp_width) + 4 * config.heads
    blocks = config.layers * 4 * C + block if recomputed else config.layers * block
    turns = 4 * config.head_width if config.pos == "rope" and isolated else 0
    mask = 4 * T if masked else 0
    return rows * T * (blocks + 4 * C + turns + mask)


def logits_bytes(config: TransformerConfig, tokens: int, runtime: Runtime) -> int:
    """What the loss needs: a chunk of logits, and the gradients it finds as it goes.

    Its gradient by the embedding waits for the end of the backward pass, where the embedding's own
    as an input is added: the chunk is gone by then, and there are two of its size.
    """
    C, V, device = config.width, config.vocab_size, runtime.device.type
    predicted = tokens if config.kind == "gpt" else tokens // 6
    logits, weight = V * min(chunk_rows(V, device), predicted), 4 * V * C
    bytes_each = 4
    if runtime.dtype.itemsize == 2:  # without Triton they are in float32 beside those in 16 bits
        bytes_each = 2 if chosen_loss(device, runtime.dtype) == "triton" else 6
    return 4 * predicted * C + weight + max(bytes_each * logits, weight)


def temporary_bytes(
    config: TransformerConfig, tokens: int, runtime: Runtime, settings: Any, logits: int
) -> int:
    """What a step needs beyond the loss for a while: a block's gradients, or Muon's products.

    A CPU's allocator finds no use for what one of these left when the next one comes, and has their
    sum; a GPU's has the larger one, of which the loss is a part or not.
    """
    C, M, V, L = config.width, config.mlp_width, config.vocab_size, config.layers
    half = runtime.dtype.itemsize == 2
    size, device = 2 if half else 4, runtime.device.type
    backward = tokens * (2 * M + 4 * C) * size
    muon = 0
    if settings.optim.optimizer == "muon":  # directions, then stacks, powers and results
        m = min(C, M)
        muon = 4 * L * (C * C + 2 * C * M + 3 * C * M + 5 * m * m)
    casts = 2 * (L * C * (4 * C + 2 * M) + V * C) if half else 0
    return casts + (backward + muon if device == "cpu" else max(backward, muon - logits))


def memory_of(
    settings: Any,
    runtime: Runtime,
    rows: int,
    config: TransformerConfig,
    placement: Placement | None = None,
) -> Memory:
    """What a run takes with so many full rows at once, when no layer drops or shares anything.

    Args: placement of --offload
    """
    s, device = settings, runtime.device.type
    compiled = s.run.compile == "on"
    impl = chosen_impl(device, runtime.dtype, config.head_width, config.dropout, compiled)
    model, half = empty_model(config), runtime.dtype.itemsize == 2
    shards = runtime.world_size if s.run.fsdp else 1
    isolated = s.pack.on or config.kind == "bert"
    masked = isolated and impl in ("dense", "adaptive")
    seq_len, recomputed = s.data.seq_len, s.run.checkpoint_activations
    state = state_bytes(model, s.optim.optimizer, shards)
    logits = logits_bytes(config, rows * seq_len, runtime)
    temporary = temporary_bytes(config, rows * seq_len, runtime, s, logits)
    is_away = placement and device != "cpu"
    away = 0
    if is_away:  # two gradients of the embeddings are the logits'
        away = sum(state.values()) - (placement.device_bytes - placement.embedding_gradients)
    if s.run.fsdp and not placement:
        parts = parts_of(model, s.optim.optimizer == "muon")
        dtype = "bf16" if half else "fp32"
        stay = (Away.NOTHING,) * len(parts)
        temporary += ShardedPlacement(parts, stay, dtype, 0, shards).in_passing
    return Memory(
        **state,
        activations=activation_bytes(config, rows, seq_len, half, isolated, masked, recomputed),
        logits=logits,
        temporary=temporary,
        torch=CODE_OF_A_STEP if device == "cpu" else 0,
        away=max(away, 0),
    )


def in_words(memory: Memory, free: int | None) -> str:
    """Example: weights 6.9 MB, ..., torch 130.0 MB: about 0.30 GB of 22.50 GB free"""
    parts = [f"{what} {size / 1e6:,.1f} MB" for what, size in memory._asdict().items() if size]
    room = "" if free is None else f" of {free / 1e9:,.2f} GB free"
    return f"{', '.join(parts)}: about {memory.on_device / 1e9:,.2f} GB{room}"


# ---- micro batch
#
# How a step is cut into micro-batches: as much at once as the device holds.


class MicroBatch(NamedTuple):
    count: int  # rows of full length that a rank takes through the model at once
    why: str


# Tokens of a micro-batch at the most: more at once are no faster.
TOKENS_AT_ONCE = {"cpu": 4_096, "cuda": 32_768, "mps": 32_768}
ROOM = 0.9  # of what is free, for the estimate is one


def micro_batch(
    settings: Any, runtime: Runtime, needs: Callable[[int], int] | None = None
) -> MicroBatch:
    """How a step is cut so that it fits the device and accumulation comes out even.

    Args:    needs (rows at once) -> bytes that a rank takes then; None if nobody knows yet
    Returns: the same on all ranks
    Raises:  ValueError if the rows of --batch-tokens cannot be shared out so
    """
    seq_len, asked = settings.data.seq_len, settings.optim.micro_batch_size
    device, world_size = runtime.device.type, runtime.world_size
    rows = settings.optim.batch_tokens // seq_len
    share = rows // world_size
    most = asked or max(1, min(share, TOKENS_AT_ONCE[device] // seq_len))
    reason = "as asked" if asked else f"at most {TOKENS_AT_ONCE[device]} tokens on {device}"
    free = bytes_free(runtime) if needs and not asked else None
    if free is not None:
        fitting = max(1, bisect_right(range(1, most + 1), ROOM * free, key=needs))
        if fitting < most:
            reason = f"of {most}, what {free / 1e9:.1f} GB free have room for, by estimate"
        most = fitting
    if asked is None:
        most = next((m for m in range(most, 0, -1) if share and share % m == 0), most)
    of_documents = settings.pack.batch == "documents"  # in as many rows as they need
    if rows % (most * world_size) and not of_documents:
        raise ValueError(
            f"--batch-tokens {settings.optim.batch_tokens} makes {rows} rows of {seq_len}, which"
            f" {world_size} process(es) cannot share, --micro-batch-size {most} at once: choose a"
            f" multiple of {most * world_size * seq_len}"
        )
    what = f"{'the documents of ' * of_documents}{rows} rows of {seq_len} a step"
    return MicroBatch(most, f"{what}, {most} at once a rank ({reason})")


def bytes_free(runtime: Runtime) -> int | None:
    """What each rank has for itself: of a host, its share among the ranks there."""
    free = runtime.gather(runtime.device_free)
    if None in free:
        return None
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if runtime.device.type == "cpu" else 1
    return min(free) // ranks_here
