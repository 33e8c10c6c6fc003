"""Time of one training step as train.py makes it: plain, packed, with dropped tokens, and nanoGPT.

A step is forward, backward, clipping and the optimizer, on one batch of random tokens; nothing is
read or logged. The variants take turns, each in a process of its own (bench/turns.py). A ratio is
the median of the ratios within a turn, not a ratio of medians. For dropped tokens and for packed
rows it is printed beside the ratio that the step's FLOPs predict, and which share of that saving
was had; a token of a packed row attends to its own document alone.

On a GPU a step has 32,768 tokens, since a small one would measure the host. The peak of torch's
memory within a step is told too, and for dropped tokens the peak that would follow if all but
weights and optimizer scaled with the tokens that the layers see. There each variant is recorded as
soon as it is done, in a line of its own.

nanoGPT's model and ours compute the same function (checked first, on two layers: same weights, same
loss, same gradients, with the exact GELU that nanoGPT has) and see the same batch. nanoGPT is not
part of this project: give the folder of a clone of https://github.com/karpathy/nanoGPT, or leave it
out.

    OMP_NUM_THREADS=2 python bench/step.py                                 # the table
    OMP_NUM_THREADS=2 python bench/step.py --nanogpt ../nanoGPT --record   # and a line of results/
    python bench/step.py --device cuda --size 350M --optimizer adamw --compile --record
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nanogpt
import numpy as np
import torch
from record import append, quartiles, significant, surroundings
from torch import Tensor, nn
from turns import Taken, ratios, take_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import config
from kernels.packed_attention import bounds
from model import Transformer
from plan import Step
from support.base import runtime
from support.base.clock import Clock, StepContext, tokens_by_layer
from support.rows.batch import Batch
from support.step.flops import Laid
from support.step.muon import flops_of_orthogonalising
from support.step.sizes import Size, flops_of_row
from train import Trainer, assemble

FIRST = StepContext(seed=0, step=1, progress=0.0)  # of a step that keeps --ltd-start tokens


class Case(NamedTuple):
    """A model and its batch. `pos` is that of the variants which are not compared with nanoGPT."""

    shape: Size
    rows: int
    vocab_size: int
    turns: int
    pos: str = "learned"


CASES = {  # by --size
    "nano": Case(Size(6, 4, 128, 256), rows=8, vocab_size=4160, turns=15, pos="rope"),
    "12x256": Case(Size(12, 8, 256, 512), rows=4, vocab_size=4160, turns=9, pos="rope"),
    "124M": Case(Size(12, 12, 768, 1024), rows=1, vocab_size=50304, turns=5),
    "350M": Case(Size(24, 16, 1024, 1024), rows=16, vocab_size=50304, turns=5),
    "350M-2048": Case(Size(24, 16, 1024, 2048), rows=8, vocab_size=50304, turns=5, pos="rope"),
    "toy": Case(Size(4, 2, 16, 32), rows=2, vocab_size=64, turns=2, pos="rope"),  # does it work?
}
TOKENS_ON_GPU = 32_768  # of a step
DEFAULT_CASES = {"cpu": ("nano", "12x256", "124M"), "cuda": ("124M", "350M", "350M-2048")}


def on_device(size: str, device: str, tokens: int = TOKENS_ON_GPU) -> Case:
    """A case with as many rows as the device wants."""
    case = CASES[size]
    return case._replace(rows=tokens // case.shape.seq_len) if device == "cuda" else case


class Variant(NamedTuple):
    """`to` names the variant that its time is divided by."""

    to: str | None
    optimizer: str = "muon"
    pos: str | None = None  # as in the case
    gelu: str | None = None  # as in the model
    packed: bool = False
    piece_len: int | None = None  # of each document of a packed row; None: random lengths
    kept_share: float = 1.0
    flags: str = ""  # more of train.py's


VARIANTS = {
    "plain": Variant(None),
    "AdamW": Variant("nanoGPT", "adamw", "learned"),
    "AdamW, exact GELU": Variant("nanoGPT", "adamw", "learned", "none"),
    "Muon": Variant("nanoGPT", "muon", "learned", "none"),
    "packed": Variant("plain", packed=True),
    "packed, 64": Variant("plain", packed=True, piece_len=64),
    "keep 3/4": Variant("plain", kept_share=3 / 4),
    "keep 1/2": Variant("plain", kept_share=1 / 2),
    "keep 1/4": Variant("plain", kept_share=1 / 4),
}


def settings_of(case: Case, variant: Variant, device: str, compiled: bool) -> config.Config:
    """A run of train.py whose every step is like this variant's."""
    layers, heads, width, seq_len = case.shape
    flags = f"--device {device} --layers {layers} --heads {heads} --width {width}"
    flags += f" --seq-len {seq_len} --batch-tokens {case.rows * seq_len} --tokens 1B"
    flags += (
        " --lr 1e-4"  # at the recipe's, losses on one batch fall to denormal numbers, slow ones
    )
    flags += f" --pos {variant.pos or case.pos} --optimizer {variant.optimizer}"
    flags += " --size 1.3B" * (seq_len > 1024) + " --size 124M" * (256 < seq_len <= 1024)
    if variant.kept_share < 1:
        flags += f" --ltd --ltd-start {int(variant.kept_share * seq_len)}"
    flags += f" {variant.flags}" + f" --compile {'on' if compiled else 'off'}"
    return config.build(config.parse(flags.split()))


def draw_documents(
    B: int, T: int, generator: torch.Generator, piece_len: int | None
) -> tuple[Tensor, Tensor]:
    """Positions and doc_ids (B, T) of full rows of about five documents each, or of equal ones."""
    index = torch.arange(T).expand(B, T)
    if piece_len:
        return index % piece_len, index // piece_len
    starts = torch.rand(B, T, generator=generator) < 4 / T
    starts[:, 0] = True
    positions = index - torch.where(starts, index, 0).cummax(dim=1).values
    return positions, starts.cumsum(dim=1) - 1


def batch_of(case: Case, packed: bool, piece_len: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(0)
    B, T = case.rows, case.shape.seq_len
    tokens, targets = torch.randint(case.vocab_size, (2, B, T), generator=generator)  # (B, T) each
    documents = draw_documents(B, T, generator, piece_len) if packed else (None, None)
    return Batch(tokens, targets, *documents)


def model_of(settings: config.Config, case: Case, gelu: str | None) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config.transformer_config(settings, case.vocab_size, case.shape.seq_len))
    if gelu:
        for block in model.h:
            block.mlp.gelu = nn.GELU(approximate=gelu)
    return model


def build_ours(case: Case, variant: Variant, device: str, compiled: bool) -> Callable:
    """In a process of its own: everything as train.py assembles it."""
    here = runtime.start(device, "auto")
    settings = settings_of(case, variant, device, compiled)
    model = model_of(settings, case, variant.gelu)
    trainer = assemble(settings, model, here, case.rows)
    return step_of(trainer, batch_of(case, variant.packed, variant.piece_len))


def step_of(trainer: Trainer, batch: Batch) -> Callable:
    """A step of train.py on this batch, in the middle of a run whose schedules have just begun."""
    T = batch.tokens.shape[1]
    half = trainer.settings.optim.tokens // 2  # far from where the learning rate is 0
    step = Step(
        batch=batch,
        targets=batch.targets.numel(),
        of_answer=None,
        context=FIRST,
        max_piece_len=T,
        kept_tokens=T,
        padding_share=0.0,
        pieces=len(batch.tokens),
        attention_share=1.0,
        laid=Laid(np.full(len(batch.tokens), T), np.arange(len(batch.tokens) + 1)),
        stage={},
        note="",
        before=Clock(consumed_tokens=half),
        after=Clock(consumed_tokens=half),
    )
    return lambda: trainer.step(step)


def build_theirs(folder: Path, case: Case, device: str, compiled: bool) -> Callable:
    torch.manual_seed(0)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    model = nanogpt.build(folder, case.shape, case.vocab_size, device)
    tokens, targets, _, _ = batch_of(case, packed=False).to(torch.device(device))
    return nanogpt.step_of(model, tokens, targets, compiled)


def tokens_seen(settings: config.Config) -> list[int]:
    """How many tokens of a row each layer sees in the step that is timed."""
    return tokens_by_layer(settings, FIRST, settings.data.seq_len)


def flops_of(case: Case, variant: Variant, device: str) -> int:
    """Of a whole step, the optimizer's matrix products included."""
    settings = settings_of(case, variant, device, compiled=False)
    shape = config.transformer_config(settings, case.vocab_size)
    tokens = tokens_seen(settings)
    flops = case.rows * flops_of_row(shape, tokens, case.shape.seq_len)
    if variant.packed:
        start, end = bounds(batch_of(case, True, variant.piece_len).doc_ids)
        seen = (end - start).sum().item() / case.rows  # of T * T
        unseen = case.shape.seq_len**2 - seen
        flops -= int(case.rows * shape.layers * 6 * shape.width * unseen)
    if variant.optimizer == "muon":
        flops += shape.layers * flops_of_orthogonalising(shape.width, shape.mlp_width, device)
    return flops


def memory_of(
    name: str,
    taken: dict[str, list[Taken]],
    case: Case,
    device: str,
    variants: dict[str, Variant],
) -> dict:
    """Peak in GB of a step on a GPU; for dropped tokens beside what the plain step's predicts."""
    last = taken[name][-1]
    if not last.peak_bytes:
        return {}
    figures = {"peak_gb": significant(last.peak_bytes / 1e9, 4)}
    figures["resident_gb"] = significant(last.resident_bytes / 1e9, 4)
    if name in variants and variants[name].kept_share < 1 and variants[name].to in taken:
        plain = taken[variants[name].to][-1]
        tokens = tokens_seen(settings_of(case, variants[name], device, compiled=False))
        share = sum(tokens) / (len(tokens) * case.shape.seq_len)
        predicted = plain.resident_bytes + share * (plain.peak_bytes - plain.resident_bytes)
        figures["predicted_peak_gb"] = significant(predicted / 1e9, 4)
    return figures


def summarise(
    taken: dict[str, list[Taken]],
    case: Case,
    device: str,
    variants: dict[str, Variant] = VARIANTS,
) -> dict[str, dict]:
    """Quartiles of milliseconds and of the ratio, within a turn, to the variant's reference."""
    figures = {}
    for name, steps in taken.items():
        figures[name] = {"ms": quartiles([1e3 * one.seconds for one in steps])}
        reference = variants[name].to if name in variants else None
        if reference in taken:
            figures[name]["ratio"] = quartiles(ratios(steps, taken[reference]))
            figures[name]["to"] = reference
        if name in variants:
            flops = flops_of(case, variants[name], device)
            figures[name]["gflop"] = round(flops / 1e9, 2)
            if reference in taken and reference in variants:
                predicted = flops / flops_of(case, variants[reference], device)
                if predicted < 1:
                    had = (1 - figures[name]["ratio"][1]) / (1 - predicted)
                    figures[name] |= {"predicted": round(predicted, 4), "saving_had": round(had, 3)}
        figures[name] |= memory_of(name, taken, case, device, variants)
    return figures


def compare(
    jobs: dict[str, tuple],
    case: Case,
    device: str,
    variants: dict[str, Variant] = VARIANTS,
    keep: Callable[[dict], None] = lambda steps: None,
) -> dict[str, dict]:
    """Time steps and print them; `keep` gets the figures of those that are new, as they come."""
    figures = {}
    for new, taken in take_turns(jobs, case.turns, device):
        figures = summarise(taken, case, device, variants)
        for name in new:
            print(show(name, figures[name]), flush=True)
        keep({name: figures[name] for name in new})
    return figures


def check_same_function(folder: Path, case: Case) -> None:
    case = case._replace(shape=case.shape._replace(layers=2), rows=1)
    settings = settings_of(case, VARIANTS["AdamW, exact GELU"], "cpu", compiled=False)
    theirs = nanogpt.build(folder, case.shape, case.vocab_size, "cpu")
    nanogpt.check_same_function(model_of(settings, case, "none"), theirs, batch_of(case, False))


def show(name: str, figure: dict) -> str:
    low, median, high = figure["ms"]
    line = f"{name:>18} {median:9.1f} ms [{low:.1f}, {high:.1f}]"
    if "ratio" in figure:
        low, median, high = figure["ratio"]
        line += f"   {median:.3f} [{low:.3f}, {high:.3f}] of {figure['to']}"
    if "predicted" in figure:
        line += f"   FLOPs say {figure['predicted']:.3f}: {figure['saving_had']:.0%} of the saving"
    if "peak_gb" in figure:
        line += f"   peak {figure['peak_gb']:.2f} GB"
    if "predicted_peak_gb" in figure:
        line += f", {figure['predicted_peak_gb']:.2f} predicted"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, help="folder of a nanoGPT clone (default: none)")
    parser.add_argument("--size", choices=CASES, nargs="+", help="(default: by --device)")
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument(
        "--optimizer",
        choices=("muon", "adamw"),
        default="muon",
        help="of those not compared with nanoGPT",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true", help="as --compile of train.py")
    parser.add_argument("--record", action="store_true", help="append to results/step.jsonl")
    flags = parser.parse_args()
    device, compiled = flags.device, flags.compile
    if flags.nanogpt:
        nanogpt.load(flags.nanogpt)
    about = surroundings(device) | {
        "bench": "step",
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "dtype": "bf16 autocast" if device == "cuda" else "fp32",
        "compile": compiled,
    }
    print(f"{about['hardware']}, {about['threads']} threads, {about['dtype']}")
    variants = {
        name: variant if variant.to == "nanoGPT" else variant._replace(optimizer=flags.optimizer)
        for name, variant in VARIANTS.items()
        if name in flags.variants
    }
    for size in flags.size or DEFAULT_CASES[device]:
        case = on_device(size, device)
        jobs = {
            name: (build_ours, case, variant, device, compiled)
            for name, variant in variants.items()
        }
        if flags.nanogpt:
            check_same_function(flags.nanogpt, case)
            jobs = {"nanoGPT": (build_theirs, flags.nanogpt, case, device, compiled), **jobs}
        print(
            f"\n{size}: {case.rows} x {case.shape.seq_len} tokens, V {case.vocab_size:,};"
            f" medians of {case.turns} [quartiles]"
        )

        def keep(steps: dict, size: str = size, case: Case = case) -> None:
            if flags.record:
                sizes = {size: case._asdict() | {"steps": steps}}
                append("step", about | {"optimizer": flags.optimizer, "sizes": sizes})

        compare(jobs, case, device, variants, keep)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
