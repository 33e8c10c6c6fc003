"""How a step is cut into micro-batches: as much at once as the device holds."""

from typing import Any, NamedTuple

from support.runtime import Runtime


class MicroBatch(NamedTuple):
    count: int  # rows of full length that a rank takes through the model at once
    why: str


# Tokens of a micro-batch. On a CPU, 32,768 at --size 124M took 22 GB of memory.
TOKENS_AT_ONCE = {"cpu": 4_096, "cuda": 32_768, "mps": 32_768}


def micro_batch(settings: Any, runtime: Runtime) -> MicroBatch:
    """How a step is cut so that it fits the device and accumulation comes out even.

    Raises: ValueError if the rows of --batch-tokens cannot be shared out so
    """
    seq_len, asked = settings.data.seq_len, settings.optim.micro_batch_size
    device, world_size = runtime.device.type, runtime.world_size
    rows = settings.optim.batch_tokens // seq_len
    share = rows // world_size
    most = asked or max(1, min(share, TOKENS_AT_ONCE[device] // seq_len))
    if asked is None:
        most = next((m for m in range(most, 0, -1) if share and share % m == 0), most)
    of_documents = settings.pack.batch == "documents"  # in as many rows as they need
    if rows % (most * world_size) and not of_documents:
        raise ValueError(
            f"--batch-tokens {settings.optim.batch_tokens} makes {rows} rows of {seq_len}, which"
            f" {world_size} process(es) cannot share, --micro-batch-size {most} at once: choose a"
            f" multiple of {most * world_size * seq_len}"
        )
    reason = "as asked" if asked else f"at most {TOKENS_AT_ONCE[device]} tokens on {device}"
    what = f"{'the documents of ' * of_documents}{rows} rows of {seq_len} a step"
    return MicroBatch(most, f"{what}, {most} at once a rank ({reason})")
