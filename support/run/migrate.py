"""Another trainer's settings as our command line, and what of them has no counterpart here.

DeepSpeed counts steps, and train.py consumed tokens. So a curriculum ends at the share of --tokens
that its steps consume, with shorter rows and dropped tokens counted as the clock counts them.
docs/migrate.md has every key.

    python -m support.run.migrate deepspeed ds_config.json --tokens 300B --seq-len 2048
"""

import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from support.base import runtime
from support.base.clock import pace
from support.base.numbers import count
from support.base.typed_json import parsed
from support.rows.samples import MULTIPLE

CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
METRIC = f"{CURRICULUM}.curriculum_metrics"
LTD = "data_efficiency.data_routing.random_ltd"
LEGACY = "curriculum_learning"
POINTS = 1000  # steps at which a schedule is read to find what it consumes

# Metrics, as DeepSpeed's documentation and Megatron-DeepSpeed's scripts name them.
METRICS = {
    "seqlen_truncate": "seqlen",
    "seqlen_reshape": "seqlen-reshape",
    "seqlen": "length",
    "voc": "rarity",
    "vocabularyrarity": "rarity",
    "vocab_rarity": "rarity",
    "seqlen_vocab_rarity": "length-rarity",
}

# Key -> the flags of its value; None if this value has none.
FLAGS: dict[str, Callable[[Any], str | None]] = {
    "train_micro_batch_size_per_gpu": "--micro-batch-size {:d}".format,
    "gradient_clipping": "--grad-clip {:g}".format,
    "bf16.enabled": {True: "--dtype bf16", False: ""}.get,
    "fp16.enabled": {True: "--dtype fp16", False: ""}.get,
    "zero_optimization.stage": {0: "", 3: "--fsdp"}.get,
    "optimizer.type": {"Adam": "--optimizer adamw", "AdamW": "--optimizer adamw"}.get,
    "optimizer.params.lr": "--lr {:g}".format,
    "optimizer.params.betas": lambda betas: f"--beta1 {betas[0]:g} --beta2 {betas[1]:g}",
    "optimizer.params.weight_decay": "--weight-decay {:g}".format,
    "data_efficiency.seed": "--seed {:d}".format,
    f"{LTD}.enabled": {True: "--ltd"}.get,
    f"{LTD}.total_layer_num": "--layers {:d}".format,
    f"{LTD}.random_ltd_layer_id": lambda ids: f"--ltd-layers {','.join(f'{i:d}' for i in ids)}",
    f"{LTD}.model_type": {"decoder": "", "encoder": "--model bert"}.get,
    f"{LTD}.layer_token_lr_schedule.enabled": {True: "--lr-clock layer-tokens", False: ""}.get,
    f"{LTD}.random_ltd_schedule.schedule_type": {"fixed_linear": "--ltd-pace linear"}.get,
    f"{LTD}.random_ltd_schedule.schedule_config.require_steps": "--ltd-steps {:d}".format,
    f"{LTD}.random_ltd_schedule.schedule_config.seq_per_step": "--ltd-multiple {:d}".format,
}

# Key, or the beginning of several -> why it has no flag; "" where another key says it.
REASONS = {
    "train_batch_size": "",
    "gradient_accumulation_steps": "",
    "data_efficiency.enabled": "",
    "data_efficiency.data_sampling.enabled": "",
    "data_efficiency.data_sampling.num_epochs": "a run ends at --tokens",
    "data_efficiency.data_sampling.num_workers": "one thread reads ahead",
    "data_efficiency.data_sampling.pin_memory": "a batch for a GPU is always page-locked",
    "data_efficiency.data_sampling.dynamic_batching": "a step has --batch-tokens; see --pack",
    f"{CURRICULUM}.enabled": "",
    f"{CURRICULUM}.data_cluster_path": "pools are computed and need no files",
    f"{METRIC}.*.index_to_sample_path": "analyze.py makes the index, see --curriculum-index",
    f"{METRIC}.*.index_to_metric_path": "analyze.py makes the index, see --curriculum-index",
    f"{METRIC}.*": "",
    "data_efficiency.data_routing.enabled": "",
    f"{LTD}.random_ltd_layer_num": "",
    f"{LTD}.random_ltd_schedule.min_value": "",
    f"{LTD}.random_ltd_schedule.max_value": "",
    f"{LTD}.layer_token_lr_schedule": "--schedule is the only schedule of the learning rate",
    f"{LTD}.model_mask_name": "a mask is made from the documents of the kept tokens",
    f"{LTD}.hidden_state_order": "states are always (row, position, width)",
    LEGACY: "",
}


def leaves(tree: dict, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested objects with its key: ("bf16.enabled", True)."""
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from leaves(value, name)
        else:
            yield name, value


def section(tree: dict, path: str) -> dict:
    """The object at a path if it is there and its own `enabled` is true, else {}."""
    for key in path.split("."):
        tree = tree.get(key, {})
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


def consumed(steps: int, seq_len: int, lengths: list[dict], ltd: dict) -> float:
    """Tokens that one row of every step consumes in all, by the clock.

    Paper:   arXiv 2212.03597, section 3.3
    Args:    lengths metrics that cut rows
             ltd     the object random_ltd; {} if it is off
    Example: a row that grows linearly from 0 to 2,048 consumes 1,024 a step
    """

    def row(step: float) -> float:
        seen = min([seq_len, *(difficulty(metric, step) for metric in lengths)])
        if not ltd:
            return seen
        grows = ltd["random_ltd_schedule"]
        how, ends = grows["schedule_config"], (grows["min_value"], grows["max_value"])
        kept = pace(step, how["require_steps"], *ends, multiple=how["seq_per_step"])
        kept = min(seen, kept)
        return seen - (seen - kept) * len(ltd["random_ltd_layer_id"]) / ltd["total_layer_num"]

    return steps * fmean(row((point + 0.5) / POINTS * steps) for point in range(POINTS))


def paced(ours: str, metric: dict, seq_len: int, share: Callable[[int], str]) -> dict[str, str]:
    """What a metric adds to --curriculum, --curriculum-start and so on; "" for the default.

    Args: share of --tokens that is consumed by a step
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
        ends = [*(f"@{share(step)}" for step in how["max_step"]), ""]
        levels = zip(map(level, how["difficulty"]), ends, strict=True)
        return {"": ours, "-pace": ":".join(["discrete", *map("".join, levels)]), "-by": by}
    words = {"": ours, "-start": level(metric["min_difficulty"]), "-by": by}
    if kind != "custom":
        degree = how["root_degree"] if kind == "fixed_root" else 1
        words["-share"] = share(how["total_curriculum_step"])
        words["-pace"] = "linear" if degree == 1 else f"root:{degree}"
    return words


def deepspeed(
    config: dict, budget: int | None, seq_len: int | None
) -> tuple[list[str], dict[str, str]]:
    """A DeepSpeed configuration as the words of a command line, and why other keys have none.

    A technique is on by its own `enabled` alone, as in DeepSpeed's engine. The legacy curriculum
    cuts rows, as seqlen_truncate does.

    Args:   budget  --tokens; needed where a curriculum ends after a number of steps
            seq_len tokens of a row; without it the longest that the file names
    Raises: ValueError for what is missing; KeyError, TypeError and the like for what is malformed
    """
    sections = {path: section(config, path) for path in (LTD, CURRICULUM, LEGACY)}
    ltd, legacy = sections[LTD], sections[LEGACY]
    metrics = dict(sections[CURRICULUM].get("curriculum_metrics", {}))
    metrics |= {"seqlen_truncate": legacy} if legacy else {}
    lengths = [m for name, m in metrics.items() if METRICS.get(name, "").startswith("seqlen")]
    ends = {metric["max_difficulty"] for metric in lengths}
    ends |= {ltd["random_ltd_schedule"]["max_value"]} if ltd else set()
    seq_len, rows = seq_len or max(ends, default=0), config.get("train_batch_size")
    if not (seq_len and isinstance(rows, int)):
        raise ValueError(
            "a step's tokens are train_batch_size, a number, times --seq-len: give both"
        )
    if metrics and not budget:
        raise ValueError("a curriculum ends at a share of the run: add --tokens")

    def share(step: int) -> str:
        part = rows * consumed(step, seq_len, lengths, ltd) / budget
        if not 0 < part <= 1:
            raise ValueError(f"{step:,} steps of a curriculum are {part:.3g} times --tokens")
        return f"{part:.4g}"

    words = ["--seq-len", str(seq_len), "--batch-tokens", str(rows * seq_len)]
    words += ["--tokens", str(budget)] if budget else []
    notes = {}
    for path, value in leaves(config):
        off = [part for part in sections if path.startswith(f"{part}.") and not sections[part]]
        for name in metrics:
            path = path.replace(f"{METRIC}.{name}.", f"{METRIC}.*.")
        written = FLAGS[path](value) if path in FLAGS and value != "auto" else None
        if off:
            notes[off[0]] = "it is not enabled"
        elif written is not None:
            words += written.split()
        else:
            key = next((key for key in REASONS if f"{path}.".startswith(f"{key}.")), path)
            notes[key] = REASONS.get(key, "nothing in train.py corresponds to it")
    if ltd:
        grows = ltd["random_ltd_schedule"]
        multiple = grows["schedule_config"]["seq_per_step"]
        words += ["--ltd-start", str(max(grows["min_value"] // multiple, 1) * multiple)]

    found = []
    for name, metric in metrics.items():
        ours = METRICS.get(name, "")
        if not ours:
            notes[name] = f"write it as a function: --curriculum path.py:{name}"
        elif metric.get("clustering_type") == "single_cluster" and not ours.startswith("seqlen"):
            notes[name] = "in a single cluster a metric chooses no samples"
        else:
            found.append(paced(ours, metric, seq_len, share))
        if metric["schedule_type"] == "custom":
            notes[name] = "its schedule is code: --curriculum-pace path.py:name"
    for name in ("", "-start", "-share", "-pace", "-by"):
        values = [each.get(name, "") for each in found]
        if any(values):
            words += [f"--curriculum{name}", ",".join(values)]
    if any(each[""].startswith("length") for each in found) and "--model" not in words:
        words += ["--model", "bert"]  # a GPT's samples are all as long
    if ends - {seq_len}:
        notes["max_difficulty, max_value"] = f"lengths and kept tokens grow to a row, {seq_len}"
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
    except KeyError as error:
        raise ValueError(f"{args.config}: a technique that is on needs the key {error}") from None
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from None
    except (TypeError, AttributeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"{args.config} is no configuration of DeepSpeed: {error}") from None
    print(runtime.printable(shlex.join(["python", "train.py", *words])))
    for path, why in notes.items():
        print(runtime.printable(f"{path}: {why}"))


if __name__ == "__main__":
    runtime.exit_cleanly(main)
