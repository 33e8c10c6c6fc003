"""What a run takes of the device's memory, by estimate, and the micro-batch that fits.

Weights, gradients and optimizer state are counted exactly. Activations are what autograd keeps of
each block, seen while one runs (support/step/sizes.py: `counted`). Added to these is the most that
any moment of a step needs for a while: the logits, the end of the backward pass, or Muon's step.
Not counted are a GPU's workspaces and what an allocator cannot use again; the text stays on the
disk.
"""

import os
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from kernels.cross_entropy import chosen_impl as chosen_loss
from kernels.cross_entropy import chunk_rows
from model import Transformer, TransformerConfig
from support.runtime import Runtime
from support.step.flops import attention_of
from support.step.optim import state_bytes
from support.step.placement import Placement
from support.step.sizes import counted, empty_model, weights_of_block

if TYPE_CHECKING:
    from config import Config

# Bytes of torch's own code that a CPU's first step brings into memory (12 x 256 and smaller).
CODE_OF_A_STEP = 130_000_000


class Memory(NamedTuple):
    """Bytes that a rank takes at most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # of one micro-batch
    logits: int  # some rows at once, and their gradients, which the loss keeps
    temporary: int  # casts to half precision, a block's backward, Muon's products
    torch: int  # its own code, which a CPU's first step brings into memory
    away: int  # of the first three, what --offload keeps on the host and not on the device

    @property
    def on_device(self) -> int:
        """What has to be free before any of it is there."""
        return sum(self) - 2 * self.away


def in_words(memory: Memory, free: int | None) -> str:
    """Example: weights 6.9 MB, ..., torch 130.0 MB: about 0.30 GB of 22.50 GB free"""
    kinds = [f"{kind} {size / 1e6:,.1f} MB" for kind, size in memory._asdict().items() if size]
    room = "" if free is None else f" of {free / 1e9:,.2f} GB free"
    return f"{', '.join(kinds)}: about {memory.on_device / 1e9:,.2f} GB{room}"


def memory_of(
    settings: "Config",
    runtime: Runtime,
    rows: int,
    config: TransformerConfig,
    placement: Placement | None = None,
) -> Memory:
    """What a run takes with `rows` full rows at once, if no layer drops tokens or shares weights.

    Args: placement of --offload
    """
    device, T = runtime.device.type, settings.data.seq_len
    model, is_muon = empty_model(config), settings.optim.optimizer == "muon"
    half = runtime.dtype.itemsize == 2
    isolated = settings.pack.on or config.kind == "bert"
    shards = runtime.world_size if settings.run.fsdp else 1
    state = state_bytes(dict(model.named_parameters()), is_muon, shards)
    logits = logits_bytes(config, rows * T, runtime)
    temporary = temporary_bytes(config, rows * T, runtime, is_muon=is_muon, logits=logits)
    away = 0
    if placement and device != "cpu":  # the embeddings' two gradients are among the logits
        away = sum(state.values()) - (placement.device_bytes - placement.embedding_gradients)
    if settings.run.fsdp:
        temporary += gathered_bytes(model, half)
    return Memory(
        **state,
        activations=activation_bytes(
            config,
            rows,
            T,
            half=half,
            isolated=isolated,
            masked=isolated and attention_of(settings, runtime, config) in ("dense", "adaptive"),
            recomputed=settings.run.checkpoint_activations,
        ),
        logits=logits,
        temporary=temporary,
        torch=CODE_OF_A_STEP if device == "cpu" else 0,
        away=max(away, 0),
    )


def gathered_bytes(model: Transformer, half: bool) -> int:
    """What --fsdp has whole for a while: two gathered blocks and the buffer they are gathered in,
    one block's gradients and their fp32 sum, and all outside the blocks with its gradients and
    their sum.
    """
    total, weight = sum(p.numel() for p in model.parameters()), 2 if half else 4
    block = sum(p.numel() for p in model.h[0].parameters())
    outside = total - len(model.h) * block
    return block * (4 * weight + 4) + outside * (4 + 4 + 4)


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
          masked     whether a mask of (T, T) tells these apart
          recomputed whether each block keeps only its input, except the one that runs
    Example: of a token, a GPT-2 block of width C and MLP 4 C keeps 16 C numbers in fp32: what its
             norms got and returned (4 C), queries, keys and values (3 C), attention's output (C),
             and what GELU got and returned (8 C)
    """
    C, block = config.width, counted(config, half=half).kept
    blocks = config.layers * 4 * C + block if recomputed else config.layers * block
    angles = 4 * config.head_width if config.pos == "rope" and isolated else 0
    mask = 4 * T if masked else 0
    return rows * T * (blocks + 4 * C + angles + mask)


def logits_bytes(config: TransformerConfig, tokens: int, runtime: Runtime) -> int:
    """What the loss needs: a chunk of logits, and the gradients it makes as it goes.

    Its gradient by the embedding waits for the end of the backward pass, where the embedding's own
    as an input is added: the chunk is gone by then, and there are two of its size.
    """
    C, V, device = config.width, config.vocab_size, runtime.device.type
    predicted = tokens if config.kind == "gpt" else tokens // 6
    logits = V * min(chunk_rows(V, device), predicted)
    bytes_each = 4
    if runtime.dtype.itemsize == 2:  # without Triton they are in float32 beside those in 16 bits
        bytes_each = 2 if chosen_loss(device, runtime.dtype) == "triton" else 6
    gradient = 4 * V * C
    return 4 * predicted * C + gradient + max(bytes_each * logits, gradient)


def temporary_bytes(
    config: TransformerConfig, tokens: int, runtime: Runtime, is_muon: bool, logits: int
) -> int:
    """What a step needs for a short time besides the loss: a block's gradients, or Muon's products.

    On a CPU these add up, because the allocator does not use the memory of one for the next; a GPU
    needs the larger one, and Muon's products may take the place of the logits.
    """
    C, M, V, L = config.width, config.mlp_width, config.vocab_size, config.layers
    half = runtime.dtype.itemsize == 2
    backward = tokens * (2 * M + 4 * C) * (2 if half else 4)
    muon = 0
    if is_muon:  # directions, then stacks, powers and results
        muon = 4 * L * (C * C + 2 * C * M + 3 * C * M + 5 * min(C, M) ** 2)
    casts = 2 * (L * weights_of_block(config) + V * C) if half else 0
    if runtime.device.type == "cpu":
        return casts + backward + muon
    return casts + max(backward, muon - logits)


# ---- the micro-batch

# Tokens of a micro-batch at most: more at once are no faster.
TOKENS_AT_ONCE = {"cpu": 4_096, "cuda": 32_768, "mps": 32_768}
ROOM = 0.9  # of the free memory, because the need is an estimate


class MicroBatch(NamedTuple):
    count: int  # rows of full length that a rank takes through the model at once
    why: str


def micro_batch(
    settings: "Config",
    runtime: Runtime,
    config: TransformerConfig | None = None,
    placement: Placement | None = None,
) -> MicroBatch:
    """Cut a step so that it fits the device and accumulation comes out even.

    Args:    config    of the model; None if it is not known yet
             placement of --offload
    Returns: the same on all ranks
    Raises:  ValueError if the ranks cannot share the rows of --batch-tokens
    """
    seq_len, asked = settings.data.seq_len, settings.optim.micro_batch_size
    device, world_size = runtime.device.type, runtime.world_size
    rows = settings.optim.batch_tokens // seq_len
    share = rows // world_size
    most, reason = asked, "as asked"
    if asked is None:
        most = max(1, min(share, TOKENS_AT_ONCE[device] // seq_len))
        reason = f"at most {TOKENS_AT_ONCE[device]} tokens on {device}"
        free = bytes_free(runtime) if config else None
        if free is not None:

            def needed(rows: int) -> int:
                return memory_of(settings, runtime, rows, config, placement).on_device

            fitting = max(1, bisect_right(range(1, most + 1), ROOM * free, key=needed))
            if fitting < most:
                reason = f"{most} would take more than the {free / 1e9:.1f} GB that are free"
            most = fitting
        most = next((m for m in range(most, 0, -1) if share and share % m == 0), most)
    of_documents = settings.pack.batch == "documents"  # in as many rows as they need
    if rows % (most * world_size) and not of_documents:
        raise ValueError(
            f"--batch-tokens {settings.optim.batch_tokens} is not a multiple of"
            f" {most * world_size * seq_len}: ranks {world_size} x --micro-batch-size {most} x"
            f" --seq-len {seq_len}"
        )
    documents = "the documents of " if of_documents else ""
    step = f"{documents}{rows} rows of {seq_len} a step"
    return MicroBatch(most, f"{step}, {most} at once a rank ({reason})")


def bytes_free(runtime: Runtime) -> int | None:
    """Free memory of each rank; ranks on one CPU share it."""
    free = runtime.gather(runtime.device_free)
    if None in free:
        return None
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if runtime.device.type == "cpu" else 1
    return min(free) // ranks_here
