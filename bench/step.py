"""Time a training step as train.py makes it: plain, packed, with dropped tokens, and nanoGPT's.

A step is forward, backward, clipping and the optimizer, on rows of the embedded corpus that have
been read already. Each variant is a few flags of train.py. It has a process of its own, takes turns
with the others (bench/measure.py), and repeats the first --steps steps of its run. A ratio is the
median of the ratios within each turn. Next to it are the ratio that FLOPs predict, if each token
attends only to its own document, and the share of the predicted saving that was realised.

    packed, short pieces   tokens attend to their own document; short pieces are at most a quarter
                           of a row
    padded                 one piece a row; "masked" computes attention over the padding too. Its
                           time divided by that of "packed" is packing's speedup in real tokens a
                           second, divided by the factor by which packed steps hold more of them.
                           Krell et al. report 0.956, with padding computed in full (arXiv
                           2107.02027, table 1)
    keep 1/2               half of the tokens, in the layers that --ltd drops from
    same documents         packed, with the documents of the plain step in fewer rows
    AdamW, Muon            compared with nanoGPT's step with AdamW

On a GPU a step has 32,768 tokens, because small steps would measure the host. There torch's peak
memory in the step is shown too and, for dropped tokens, the peak that would result if everything
except weights and optimizer state scaled with the tokens that the layers see. Each variant is
recorded as soon as it is done.

nanoGPT's model and ours compute the same function, which is checked first (bench/nanogpt.py).
nanoGPT is not part of this project: clone https://github.com/karpathy/nanoGPT and give its folder.

    OMP_NUM_THREADS=2 python bench/step.py                                 # print the figures
    OMP_NUM_THREADS=2 python bench/step.py --nanogpt ../nanoGPT --record   # and add to results/
    OMP_NUM_THREADS=2 python bench/step.py --size 6x128-512 12x256 --steps 4 \\
        --variants packed padded "padded, masked" "short pieces"           # what packing saves
    python prepare.py corpus/qa.jsonl --out runs/qa; OMP_NUM_THREADS=2 python bench/step.py \\
        --size qa --variants plain "same documents"                        # prompts and answers
    python bench/step.py --device cuda --size 350M --optimizer adamw --compile --record
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nanogpt
import torch
from measure import Measurement, command_line, quartiles, ratios, recorder, significant, take_turns
from torch import nn

import config
from data import GptTask, open_data
from model import Transformer
from plan import Plan, Step
from support import process, runtime
from support.clock import Clock
from train import Trainer, assemble

TOKENS_ON_GPU = 32_768  # in a step


class Case(NamedTuple):
    """A model, as flags of train.py, and its batch."""

    flags: str
    batch_tokens: int
    vocab_size: int
    turns: int
    steps_in_turn: int = 1  # the first steps of the run

    def settings(self, device: str, more: str = "") -> config.Config:
        """Return the settings of a run whose first steps are timed, at a small learning rate.

        The recipe's rate would drive the loss on one batch down to denormal numbers, which are
        slow.
        """
        flags = f"{self.flags} --batch-tokens {self.batch_tokens} --tokens 1B"
        flags += " --lr 5e-5 --warmup-tokens 0 --tied"
        return config.build(config.parse(f"--device {device} {flags} {more}".split()))

    def on(self, device: str, tokens: int = TOKENS_ON_GPU) -> "Case":
        """Return the case with a step large enough for the device."""
        return self._replace(batch_tokens=tokens) if device == "cuda" else self


CASES = {  # by --size
    "6x128": Case("--layers 6 --seq-len 256", 2048, 4160, turns=15),
    "6x128-512": Case("--layers 6 --seq-len 512", 4096, 4160, turns=15),
    "12x256": Case("--layers 12 --heads 8 --width 256 --seq-len 512", 2048, 4160, turns=9),
    "124M": Case("--size 124M", 1024, 50304, turns=5),
    "350M": Case("--size 350M", 16384, 50304, turns=5),
    "350M-2048": Case("--size 1.3B --width 1024 --seq-len 2048 --pos rope", 16384, 50304, turns=5),
    "1.3B": Case("--size 1.3B", 16384, 50304, turns=6),
    "qa": Case("--seq-len 256 --data runs/qa", 8192, 4160, turns=15),
    "toy": Case("--layers 4 --heads 2 --width 16 --seq-len 32", 64, 4160, turns=2),  # a dry run
}
DEFAULT_CASES = {"cpu": ("6x128", "12x256", "124M"), "cuda": ("124M", "350M", "350M-2048")}


class Variant(NamedTuple):
    flags: str = ""
    to: str | None = None  # the variant by which its time is divided
    kept_share: float = 1.0
    exact_gelu: bool = False  # as in nanoGPT
    dense: bool = False  # attention under a mask

    def settings(self, case: Case, device: str, more: str = "") -> config.Config:
        flags = f"--compile off {more} {self.flags}"  # if a flag is repeated, the last one counts
        if self.kept_share < 1:
            seq_len = case.settings(device).data.seq_len
            flags += f" --ltd --ltd-start {int(self.kept_share * seq_len)}"
        return case.settings(device, flags)


LIKE_NANOGPT = "--pos learned --optimizer"
THEIRS = "nanoGPT"
VARIANTS = {
    THEIRS: Variant(f"{LIKE_NANOGPT} adamw", exact_gelu=True),
    "plain": Variant(),
    "AdamW": Variant(f"{LIKE_NANOGPT} adamw", to=THEIRS),
    "AdamW, exact GELU": Variant(f"{LIKE_NANOGPT} adamw", to=THEIRS, exact_gelu=True),
    "Muon": Variant(f"{LIKE_NANOGPT} muon", to=THEIRS, exact_gelu=True),
    "packed": Variant("--pack", to="plain"),
    "same documents": Variant("--pack --pack-batch documents", to="plain"),
    "short pieces": Variant("--pack --curriculum seqlen", to="packed"),
    "padded": Variant("--pack --pack-max-per-row 1", to="packed"),
    "padded, masked": Variant("--pack --pack-max-per-row 1", to="packed", dense=True),
    # 350M with AdamW takes 5.7 GB without offload
    "offloaded": Variant("--offload --offload-budget 4GiB", to="plain"),
    "weights offloaded": Variant("--offload --offload-budget 2GiB", to="plain"),
    "keep 3/4": Variant(to="plain", kept_share=3 / 4),
    "keep 1/2": Variant(to="plain", kept_share=1 / 2),
    "keep 1/4": Variant(to="plain", kept_share=1 / 4),
}
OURS = [name for name in VARIANTS if name != THEIRS]
NOT_DEFAULT = re.compile("padded|offload|same")
DEFAULT_VARIANTS = [name for name in OURS if not NOT_DEFAULT.search(name)]


# ---- a variant: its steps, and the trainer that makes them


def steps_of(
    settings: config.Config, device: str, count: int, vocab_size: int = 4_160
) -> list[Step]:
    """Plan the first steps of a run."""
    shape = config.transformer_config(settings, vocab_size)
    here, clock = runtime.start(device, "auto"), Clock()
    plan = Plan(settings, open_data(settings.data, here).store, GptTask(), here, shape)
    steps = []
    for _ in range(count):
        steps.append(plan(clock))
        clock = steps[-1].after
    return steps


def model_of(settings: config.Config, vocab_size: int, exact_gelu: bool = False) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config.transformer_config(settings, vocab_size))
    for block in model.h if exact_gelu else ():
        block.mlp.gelu = nn.GELU(approximate="none")
    return model


def trainer_of(settings: config.Config, model: Transformer, device: str) -> Trainer:
    """Assemble a model as train.py does; one micro-batch unless --micro-batch-size is set."""
    optim, here = settings.optim, runtime.start(device, "auto")
    rows = optim.micro_batch_size or optim.batch_tokens // settings.data.seq_len
    return assemble(settings, model=model, runtime=here, micro_batch=rows)


def build_ours(case: Case, variant: Variant, device: str, flags: str = "") -> Callable:
    """Return a function that makes the steps; runs in the process of the variant."""
    settings = variant.settings(case, device, flags)
    if variant.dense:
        Transformer.attention_impl = lambda self, x: "dense"
    trainer = trainer_of(settings, model_of(settings, case.vocab_size, variant.exact_gelu), device)
    steps = steps_of(settings, device, case.steps_in_turn)

    def make() -> float:
        for step in steps:
            done = trainer.train_step(step)
        return done.loss

    return make


def build_theirs(folder: Path, case: Case, device: str, compiled: bool) -> Callable:
    torch.manual_seed(0)
    settings = case.settings(device)
    model = nanogpt.build(folder, config.transformer_config(settings, case.vocab_size), device)
    steps = steps_of(settings, device, case.steps_in_turn)
    batches = [step.batch.to(torch.device(device)) for step in steps]
    return nanogpt.step_of(model, batches, compiled)


def check_same_function(folder: Path, case: Case) -> None:
    """Check with two layers and one row that nanoGPT's model and ours compute the same."""
    row = case.settings("cpu").data.seq_len
    settings = case._replace(batch_tokens=row).settings("cpu", "--layers 2 --pos learned")
    ours = model_of(settings, case.vocab_size, exact_gelu=True)
    theirs = nanogpt.build(folder, ours.config, "cpu")
    nanogpt.check_same_function(ours, theirs, steps_of(settings, "cpu", 1)[0].batch)


# ---- figures


class Predicted(NamedTuple):
    """What is known of a variant's step without timing it."""

    flops: float  # see flops_of_step in support/sizes.py; Muon's are not counted
    real_tokens: float
    seen_share: float  # share of the tokens that layers see, on average


def predicted(case: Case, variant: Variant, device: str, flags: str = "") -> Predicted:
    settings = variant.settings(case, device, flags)
    steps = steps_of(settings, device, case.steps_in_turn, case.vocab_size)
    tokens, after = steps[0].tokens_by_layer, steps[-1].after
    return Predicted(
        flops=after.flops / len(steps),
        real_tokens=after.real_tokens / len(steps),
        seen_share=sum(tokens) / len(tokens) / settings.data.seq_len,
    )


def summarise(
    results: dict[str, list[Measurement]], case: Case, known: dict[str, Predicted]
) -> dict[str, dict]:
    """Return quartiles of milliseconds and of the ratio to a reference; on a GPU also memory."""
    figures = {}
    for name, turns in results.items():
        seconds = [turn.seconds for turn in turns]
        figure = figures[name] = {
            "ms": quartiles([1e3 * s / case.steps_in_turn for s in seconds]),
            "gflop": round(known[name].flops / 1e9, 2),
            "real_tokens": round(known[name].real_tokens, 1),
        }
        reference = VARIANTS[name].to
        if reference in results:
            others = [turn.seconds for turn in results[reference]]
            figure |= {"ratio": quartiles(ratios(seconds, others)), "to": reference}
            expected = known[name].flops / known[reference].flops
            if expected < 1:
                figure["predicted"] = round(expected, 4)
                figure["saving_had"] = round((1 - figure["ratio"][1]) / (1 - expected), 3)
        peak, resident = turns[-1].peak_bytes, turns[-1].resident_bytes
        if peak:
            figure["peak_gb"] = significant(peak / 1e9, 4)
            figure["resident_gb"] = significant(resident / 1e9, 4)
            if reference in results and known[name].seen_share < 1:
                plain = results[reference][-1]
                rest = known[name].seen_share * (plain.peak_bytes - plain.resident_bytes)
                figure["predicted_peak_gb"] = significant((plain.resident_bytes + rest) / 1e9, 4)
    return figures


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--nanogpt", type=Path, help="folder of a nanoGPT clone (default: none)")
    parser.add_argument("--size", choices=CASES, nargs="+", help="(default: by --device)")
    parser.add_argument("--variants", choices=OURS, nargs="+", default=DEFAULT_VARIANTS)
    parser.add_argument("--steps", type=int, default=1, help="steps of the run in each turn (1)")
    others = "for variants that are not compared with nanoGPT"
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help=others)
    parser.add_argument("--compile", action="store_true", help="like --compile of train.py")
    args = parser.parse_args()
    device = args.device
    if args.nanogpt:
        nanogpt.load(args.nanogpt)
    keep = recorder(
        "step",
        args,
        environment={name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "LD_PRELOAD")},
        dtype="bf16 autocast" if device == "cuda" else "fp32",
        compile=args.compile,
        optimizer=args.optimizer,
    )
    names = [THEIRS] * bool(args.nanogpt) + args.variants
    flags = f"--optimizer {args.optimizer}" + " --compile on" * args.compile
    for size in args.size or DEFAULT_CASES[device]:
        case = CASES[size].on(device)._replace(steps_in_turn=args.steps)
        jobs = {name: (build_ours, case, VARIANTS[name], device, flags) for name in names}
        if args.nanogpt:
            check_same_function(args.nanogpt, case)
            jobs[THEIRS] = (build_theirs, args.nanogpt, case, device, args.compile)
        known = {name: predicted(case, VARIANTS[name], device, flags) for name in jobs}
        for new, results in take_turns(jobs, case.turns, device):
            figures = summarise(results, case, known)
            steps = {name: figures[name] for name in new}  # whose turns are done
            keep({"size": size, **case._asdict(), "steps": steps})


if __name__ == "__main__":
    process.exit_cleanly(main)
