"""The settings of a run that are no model's, data's or optimizer's: where and how it runs."""

from dataclasses import dataclass

from support.settings import flag


@dataclass(frozen=True)
class RunConfig:
    out: str | None = flag(
        None, "folder of the run: log, checkpoints, config (default: a new one)", free=True
    )
    resume: str | None = flag(
        None,
        "go on from a checkpoint of --out",
        ("last", "previous", "best"),
        without_value="last",
        free=True,
    )
    seed: int = flag(1337, "decides the weights at the start, the order of data and every draw")
    device: str = flag("auto", "where to compute", ("auto", "cpu", "cuda", "mps"), free=True)
    dtype: str = flag("auto", "arithmetic of the model", ("auto", "fp32", "bf16", "fp16"))
    compile: str = flag(
        "auto",
        "compile each block before the first step, for every shape that will come; auto: on a GPU,"
        " where these can be listed",
        ("auto", "on", "off"),
        without_value="on",
        free=True,
    )
    checkpoint_activations: bool = flag(
        False, "keep a block's input alone and recompute the rest in the backward pass", free=True
    )
    fsdp: bool = flag(
        False, "each rank holds a part of every weight, gradient and optimizer state", free=True
    )
    eval_every: int | None = flag(
        None, "tokens between evaluations, 0 for never (default: a fifth of --tokens)", free=True
    )
    eval_tokens: int = flag(
        32_768, "held-out tokens of an evaluation on the way", least=1, free=True
    )
    final_eval_tokens: int = flag(
        1_000_000, "held-out tokens of the last evaluation, at most", least=1, free=True
    )
    checkpoint_every: int | None = flag(
        None, "tokens between checkpoints, 0 for the last only (default: a tenth)", free=True
    )
    keep: int = flag(2, "newest checkpoints to keep; the best is kept besides", least=1, free=True)
    tensorboard: bool = flag(False, "write the log for TensorBoard too", free=True)
    dry_run: bool = flag(
        False, "say what the run would take of steps, memory and time, and stop", free=True
    )
