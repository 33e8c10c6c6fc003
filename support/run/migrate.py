"""Another trainer's settings as our command line, and what of them has no counterpart here.

DeepSpeed counts steps, and train.py consumed tokens. So a curriculum ends at the share of --tokens
that its steps consume, with shorter rows and dropped tokens counted as the clock counts them, and
its root is chosen so that it is as far as DeepSpeed's after half of its steps. docs/migrate.md has
every key.

    python -m support.run.migrate deepspeed ds_config.json --tokens 300B --seq-len 2048
"""

import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator
from math import log2
from pathlib import Path
from statistics import fmean
from typing import Any

from support.base import runtime
from support.base.clock import pace
from support.base.numbers import count
from support.base.typed_json import Each, Limited, mismatch, parsed
from support.rows.samples import MULTIPLE
from support.step.optim import OptimConfig

CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
METRIC = f"{CURRICULUM}.curriculum_metrics"
LTD = "data_efficiency.data_routing.random_ltd"
CLOCK = f"{LTD}.layer_token_lr_schedule"
GROWTH = f"{LTD}.random_ltd_schedule"
LEGACY = "curriculum_learning"
RATE = "scheduler.params"
LOGS = ("tensorboard", "wandb")
POINTS = 1000  # steps at which a schedule is read to find what it consumes

# Metrics, as DeepSpeed's documentation and Megatron-DeepSpeed's scripts name them.
METRICS = {"seqlen_truncate": "seqlen", "seqlen_reshape": "seqlen-reshape", "seqlen": "length"}
METRICS |= {"voc": "rarity", "vocabularyrarity": "rarity", "vocab_rarity": "rarity"}
METRICS |= {"seqlen_vocab_rarity": "length-rarity"}

# What a scheduler does after its warmup.
RATES = {"WarmupLR": "--min-lr 1", "WarmupDecayLR": "--schedule linear --min-lr 0"}
RATES |= {"WarmupCosineLR": "--schedule cosine"}


def betas_of(betas: list[float]) -> str:
    return " ".join(f"--beta{number} {beta:g}" for number, beta in enumerate(betas, start=1))


# Key -> what DeepSpeed has there, and the flags of a value; None if this value has none.
FLAGS: dict[str, tuple[object, Callable[[Any], str | None]]] = {
    "train_micro_batch_size_per_gpu": (int, "--micro-batch-size {:d}".format),
    "gradient_clipping": (float, "--grad-clip {:g}".format),
    "bf16.enabled": (bool, {True: "--dtype bf16", False: ""}.get),
    "fp16.enabled": (bool, {True: "--dtype fp16", False: ""}.get),
    "zero_optimization.stage": (int, {0: "", 3: "--fsdp"}.get),
    "zero_optimization.offload_optimizer.device": (str, {"cpu": "--offload", "none": ""}.get),
    "zero_optimization.offload_param.device": (str, {"cpu": "--offload", "none": ""}.get),
    "optimizer.type": (str, {"Adam": "--optimizer adamw", "AdamW": "--optimizer adamw"}.get),
    "optimizer.params.lr": (float, "--lr {:g}".format),
    "optimizer.params.betas": ([float], betas_of),
    "optimizer.params.weight_decay": (float, "--weight-decay {:g}".format),
    "scheduler.type": (str, RATES.get),
    f"{RATE}.warmup_max_lr": (float, "--lr {:g}".format),
    f"{RATE}.cos_min_ratio": (float, "--min-lr {:g}".format),
    "tensorboard.enabled": (bool, {True: "--tensorboard"}.get),
    "wandb.enabled": (bool, {True: "--wandb"}.get),
    "data_efficiency.seed": (int, "--seed {:d}".format),
    f"{LTD}.enabled": (bool, {True: "--ltd"}.get),
    f"{LTD}.total_layer_num": (int, "--layers {:d}".format),
    f"{LTD}.random_ltd_layer_id": ([int], lambda ids: f"--ltd-layers {','.join(map(str, ids))}"),
    f"{LTD}.model_type": (str, {"decoder": "", "encoder": "--model bert"}.get),
    f"{CLOCK}.enabled": (bool, {True: "--lr-clock layer-tokens"}.get),
    f"{GROWTH}.schedule_type": (str, {"fixed_linear": "--ltd-pace linear"}.get),
    f"{GROWTH}.schedule_config.require_steps": (int, "--ltd-steps {:d}".format),
    f"{GROWTH}.schedule_config.seq_per_step": (int, "--ltd-multiple {:d}".format),
}

# Key, or the beginning of several -> why it has no flag, or what to know of the flag.
BUDGET = "what exceeds --offload-budget moves; by default this is half of the free memory"
REASONS = {
    "data_efficiency.data_sampling.num_epochs": "a run ends at --tokens",
    "data_efficiency.data_sampling.num_workers": "one thread reads ahead",
    "data_efficiency.data_sampling.pin_memory": "a batch for a GPU is always page-locked",
    "data_efficiency.data_sampling.dynamic_batching": "a step has --batch-tokens; see --pack",
    f"{CURRICULUM}.data_cluster_path": "pools are computed and need no files",
    f"{METRIC}.*.index_to": "analyze.py makes both files, see --curriculum-index",
    f"{CLOCK}.enabled": "padding counts: a padded BERT's rate is 0 before the run ends; add --pack",
    CLOCK: "--schedule is the only schedule of the learning rate",
    f"{LTD}.model_mask_name": "a mask is made from the documents of the kept tokens",
    f"{LTD}.hidden_state_order": "states are always (row, position, width)",
    "zero_optimization.offload_optimizer.device": BUDGET,
    "zero_optimization.offload_param.device": BUDGET,
    "zero_optimization": "of it only stage 3 (--fsdp) and an offload to the CPU have flags",
    "optimizer": "--optimizer is adamw or muon, with the flags that --help has",
    "scheduler": "warmup is linear, not log, and from 0; a decay is over tokens, until --tokens",
    "tensorboard": "the log is in the folder of the run, --out",
    "wandb": "wandb reads environment variables, such as WANDB_PROJECT",
}
# Other keys, or the program, say what these do.
NEEDLESS = ("train_batch_size", "gradient_accumulation_steps", "data_efficiency.enabled", LEGACY)
NEEDLESS += ("data_efficiency.data_sampling.enabled", "data_efficiency.data_routing.enabled")
NEEDLESS += (f"{CURRICULUM}.enabled", f"{METRIC}.*", f"{LTD}.random_ltd_layer_num")
REASONS |= dict.fromkeys([*NEEDLESS, f"{GROWTH}.max_value"], "")

# What DeepSpeed does where the file is silent, as our flags.
SILENT = {"--optimizer": "adamw", "--lr": 0.001, "--beta1": 0.9, "--beta2": 0.999}
SILENT |= {"--weight-decay": 0, "--grad-clip": 0, "--warmup-tokens": 0, "--min-lr": "1 (constant)"}
WARMUP = {f"{RATE}.warmup_num_steps": 1000, f"{RATE}.warmup_type": "log"}

# The last part of a key -> what DeepSpeed has there.
COUNT = Limited(int, {"least": 1})
COUNTS = ("min_difficulty", "max_difficulty", "total_curriculum_step", "difficulty_step")
COUNTS += ("root_degree", "min_value", "max_value", "require_steps", "seq_per_step")
KINDS = Limited(str, {"choices": ("fixed_linear", "fixed_root", "fixed_discrete", "custom")})
SHAPES = dict.fromkeys([*COUNTS, "total_layer_num"], COUNT) | {"schedule_type": KINDS}
SHAPES |= {"difficulty": [COUNT], "max_step": [COUNT], "random_ltd_layer_id": [int]}
SHAPES |= {"schedule_config": {}, "random_ltd_schedule": {}}


def require(value: object, shape: object, key: str) -> None:
    if wrong := mismatch(value, shape, key):
        raise ValueError(f"no configuration of DeepSpeed: {wrong}")


def leaves(tree: dict, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested objects, and empty object, with its key: ("bf16.enabled", True)."""
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        yield from leaves(value, name) if value and isinstance(value, dict) else [(name, value)]


def section(tree: dict, path: str) -> dict:
    """The object at a path if it is there and its own `enabled` is true, else {}."""
    for key in path.split("."):
        tree = tree.get(key, {})
        require(tree, {}, key)
    return tree if tree.get("enabled") else {}


def difficulty(metric: dict, step: float) -> float:
    """DeepSpeed's difficulty at a step; without end where only code knows it (`custom`)."""
    kind, how = metric["schedule_type"], metric.get("schedule_config", {})
    if kind == "custom":
        return float("inf")
    if kind == "fixed_discrete":
        return how["difficulty"][bisect_left(how["max_step"], step)]
    degree = how["root_degree"] if kind == "fixed_root" else 1
    low, high = metric["min_difficulty"], metric["max_difficulty"]
    over, multiple = how["total_curriculum_step"], how["difficulty_step"]
    return pace(step, over, low, high, degree, multiple)


def consumed(steps: float, seq_len: int, lengths: dict[str, dict], ltd: dict) -> float:
    """Tokens that one row of every step consumes in all, by the clock.

    Paper:   arXiv 2212.03597, section 3.3
    Args:    lengths metrics that cut rows, by our names; what seqlen-reshape cuts off is not lost
             ltd     the object random_ltd; {} if it is off
    Example: a row that grows linearly from 0 to 2,048 consumes 1,024 a step
    """

    def row(step: float) -> float:
        seen = min([seq_len, *(difficulty(metric, step) for metric in lengths.values())])
        used = seen
        if ltd:
            grows = ltd["random_ltd_schedule"]
            how, ends = grows["schedule_config"], (grows["min_value"], grows["max_value"])
            kept = pace(step, how["require_steps"], *ends, multiple=how["seq_per_step"])
            used -= max(seen - kept, 0) * len(ltd["random_ltd_layer_id"]) / ltd["total_layer_num"]
        return used * seq_len / seen if "seqlen-reshape" in lengths else used

    return steps * fmean(row((point + 0.5) / POINTS * steps) for point in range(POINTS))


def paced(ours: str, metric: dict, seq_len: int, share: Callable[[float], float]) -> dict:
    """What a metric adds to --curriculum, --curriculum-start and so on; "" for the default.

    A root of degree g over S steps becomes one of degree p over tokens, so that both are as far
    after S / 2 steps: (c(S/2) / c(S))^(1/p) = (1/2)^(1/g).

    Args:    share of --tokens that is consumed by a step: c
    Example: rows that grow evenly from almost 0 have consumed a quarter of their tokens after half
             of their steps; the square root of a quarter is a half, so p = 2
    """
    is_length, kind = ours.startswith("seqlen"), metric["schedule_type"]
    how = metric.get("schedule_config", {})
    by = "value" if metric.get("difficulty_type") == "value" and not is_length else ""

    def level(value: int) -> str:
        if is_length:
            value = min(max(value - value % MULTIPLE, MULTIPLE), seq_len)
        elif not by:
            value = max(round(100 * value / metric["max_difficulty"]), 1)
        return str(value)

    if kind == "fixed_discrete":
        ends = [*(f"@{share(step):.4g}" for step in how["max_step"]), ""]
        levels = zip(map(level, how["difficulty"]), ends, strict=True)
        return {"": ours, "-pace": ":".join(["discrete", *map("".join, levels)]), "-by": by}
    words = {"": ours, "-start": level(metric["min_difficulty"]), "-by": by}
    if kind != "custom":
        steps = how["total_curriculum_step"]
        over_steps = how["root_degree"] if kind == "fixed_root" else 1
        degree = f"{over_steps * log2(share(steps) / share(steps / 2)):.3g}"
        words["-share"] = f"{share(steps):.4g}"
        words["-pace"] = "linear" if degree == "1" else f"root:{degree}"
    return words


def deepspeed(config: dict, budget: int | None, seq_len: int | None) -> tuple[list, dict[str, str]]:
    """A DeepSpeed configuration as the words of a command line, and why other keys have none.

    A technique is on by its own `enabled` alone, as in DeepSpeed's engine. The legacy curriculum
    cuts rows, as seqlen_truncate does.

    Args:   budget  --tokens; needed where a curriculum ends after a number of steps
            seq_len tokens of a row; without it the longest that the file names
    Raises: ValueError for what is missing or malformed
    """
    require(config, {}, "")
    found = dict(leaves(config))
    for path, value in found.items():
        require(value, SHAPES.get(path.split(".")[-1], object), path)
    sections = {path: section(config, path) for path in (LTD, CURRICULUM, LEGACY, CLOCK, *LOGS)}
    ltd, legacy, notes = sections[LTD], sections[LEGACY], {}
    metrics = sections[CURRICULUM].get("curriculum_metrics", {})
    require(metrics, Each({}), METRIC)
    metrics = metrics | ({"seqlen_truncate": legacy} if legacy else {})
    chosen = {}  # metrics that have a name here
    for name, metric in metrics.items():
        ours = METRICS.get(name, "")
        if not ours:
            notes[name] = f"left out of the command: write it as --curriculum path.py:{name}"
        elif metric.get("clustering_type") == "single_cluster" and not ours.startswith("seqlen"):
            notes[name] = "left out of the command: in a single cluster it chooses no samples"
        else:
            chosen[ours] = metric
            how = metric.get("schedule_config", {})
            if len(how.get("max_step", [])) + 1 != len(how.get("difficulty", [0])):
                raise ValueError(f"{name}: difficulty must have one entry more than max_step")
            if metric["schedule_type"] == "custom":
                notes[name] = (
                    "schedule left out of the command: it is --curriculum-pace path.py:name"
                )

    # a row, and the tokens of its steps
    by_length = [ours for ours in chosen if ours.startswith("length")]
    packs = by_length and found.get(f"{LTD}.model_type") == "decoder"
    lengths = {ours: metric for ours, metric in chosen.items() if ours.startswith("seqlen")}
    ends = {metric["max_difficulty"] for metric in lengths.values()}
    ends |= {ltd["random_ltd_schedule"]["max_value"]} if ltd else set()
    seq_len, rows = seq_len or max(ends, default=0), config.get("train_batch_size")
    if not (seq_len and isinstance(rows, int)):
        raise ValueError("a step is train_batch_size, a number, times --seq-len: give both")
    if metrics and not budget:
        raise ValueError("a curriculum ends at a share of the run: add --tokens")

    def tokens(steps: float) -> float:
        return rows * consumed(steps, seq_len, {} if packs else lengths, ltd)

    def share(steps: float) -> float:
        part = tokens(steps) / budget
        if not 0 < part <= 1:
            raise ValueError(f"{steps:,} steps of a curriculum are {part:.3g} times --tokens")
        return part

    # every key, as flags or with a reason
    flags = dict(FLAGS)
    flags[f"{RATE}.warmup_num_steps"] = (COUNT, lambda n: f"--warmup-tokens {round(tokens(n))}")
    found = WARMUP | found if found.get("scheduler.type") in [*RATES] else found
    by = found[f"{GROWTH}.schedule_config.seq_per_step"] if ltd else 1
    flags[f"{GROWTH}.min_value"] = (COUNT, lambda n: f"--ltd-start {max(n - n % by, by)}")
    if found.get(f"{RATE}.warmup_max_lr", "auto") != "auto":
        found.pop("optimizer.params.lr", None)  # DeepSpeed's scheduler overwrites it
    given = [f"--seq-len {seq_len}", f"--batch-tokens {rows * seq_len}"]
    given += [f"--tokens {budget}"] if budget else []
    for path, value in found.items():
        off = [part for part in sections if path.startswith(f"{part}.") and not sections[part]]
        for name in metrics:
            path = path.replace(f"{METRIC}.{name}.", f"{METRIC}.*.")
        if off:
            notes[off[0]] = "it is not enabled"
        elif path in flags and value == "auto":
            notes[path] = "auto is for a script to fill in: give the flag yourself"
        else:
            shape, flags_of = flags.get(path, (object, lambda value: None))
            require(value, shape, path)
            written = flags_of(value)
            if written:
                given.append(written)
                notes[path] = REASONS.get(path, "")
            elif written is None:
                key = next((key for key in REASONS if path.startswith(key)), path)
                notes[key] = REASONS.get(key, "nothing in train.py corresponds to it")

    curricula = [paced(ours, metric, seq_len, share) for ours, metric in chosen.items()]
    for name in ("", "-start", "-share", "-pace", "-by"):
        values = [each.get(name, "") for each in curricula]
        if any(values):
            given.append(f"--curriculum{name} {','.join(values)}")
    if by_length:  # a GPT's rows are all as long, unless pieces are packed
        given.append("--pack" if packs else "--model bert")
        if f"{LTD}.model_type" not in found:
            notes[by_length[0]] = "lengths differ in a BERT; for a GPT put --pack for --model bert"
    if ends - {seq_len}:
        notes["max_difficulty, max_value"] = f"lengths and kept tokens grow to a row, {seq_len}"

    words = " ".join(dict.fromkeys(given)).split()
    silent = [flag for flag in SILENT if flag not in words]
    ours = {flag: getattr(OptimConfig, flag[2:].replace("-", "_")) for flag in silent}
    ours |= {flag: "as in --help" for flag, value in ours.items() if value is None}
    for who, values in {"train.py's own": ours, "DeepSpeed's own": SILENT}.items():
        notes[f"not in the file, {who}"] = ", ".join(f"{flag} {values[flag]}" for flag in silent)
    return words, {path: why for path, why in notes.items() if why}


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(prog="support.run.migrate", description=__doc__.split("\n")[0])
    verb = parser.add_subparsers(required=True).add_parser("deepspeed", help="its JSON file")
    verb.add_argument("config", help="a configuration of DeepSpeed")
    verb.add_argument("--tokens", type=count, help="of the whole run, as Megatron's --train-tokens")
    verb.add_argument("--seq-len", type=count, help="tokens of a row (default: the longest named)")
    args = parser.parse_args(argv)
    try:
        words, notes = deepspeed(parsed(Path(args.config).read_bytes()), args.tokens, args.seq_len)
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{args.config}: a technique that is on needs the key {error}") from None
    print(runtime.printable(shlex.join(["python", "train.py", *words])))
    for path, why in notes.items():
        print(runtime.printable(f"{path}: {why}"))


if __name__ == "__main__":
    runtime.exit_cleanly(main)
