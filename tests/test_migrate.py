"""DeepSpeed's published configurations as command lines that train.py accepts."""

import copy
import functools
import itertools
import json
import re
import shlex

import pytest
from test_readme import read

import config
from curriculum import parse_pace
from support.base.clock import pace
from support.base.settings import flattened
from support.run import migrate

VOC = {
    "index_to_sample_path": "a",
    "difficulty_type": "percentile",
    "clustering_type": "schedule_based",
    "min_difficulty": 1,
    "max_difficulty": 100,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 110_000, "difficulty_step": 1, "root_degree": 2},
}


def length(low=80, high=2048, steps=110_000):
    how = {"total_curriculum_step": steps, "difficulty_step": 8, "root_degree": 1}
    kinds = {"difficulty_type": "value", "clustering_type": "single_cluster"}
    return VOC | kinds | {"min_difficulty": low, "max_difficulty": high, "schedule_config": how}


def dropping(layers=24, kind="decoder", row=2048, steps=200_000):
    how = {"require_steps": steps, "seq_per_step": 16}
    schedule = {"min_value": 128, "max_value": row, "schedule_type": "fixed_linear"}
    return {
        "enabled": True,
        "total_layer_num": layers,
        "random_ltd_layer_num": layers - 2,
        "random_ltd_layer_id": [*range(1, layers - 1)],
        "model_mask_name": "attention_mask",
        "model_type": kind,
        "hidden_state_order": "seq_batch_dim",
        "random_ltd_schedule": schedule | {"schedule_config": how},
    }


def deepspeed(rows=512, ltd=None, metrics=None, **more):
    """As in Megatron-DeepSpeed's examples_deepspeed/data_efficiency."""
    curriculum = {"enabled": bool(metrics), "data_cluster_path": "c"}
    curriculum["curriculum_metrics"] = metrics or {}
    sampling = {"enabled": bool(metrics), "num_workers": 0, "curriculum_learning": curriculum}
    routing = {"enabled": bool(ltd), "random_ltd": ltd or {"enabled": False}}
    parts = {"data_sampling": sampling, "data_routing": routing}
    whole = {"train_batch_size": rows, "fp16": {"enabled": True, "hysteresis": 2}}
    return whole | {"data_efficiency": {"enabled": True, "seed": 1234} | parts} | more


ADAM = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "weight_decay": 0.01}}
GPT = deepspeed(ltd=dropping(), metrics={"voc": VOC, "seqlen_truncate": length()})
LEGACY = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 80}
LEGACY |= {"max_difficulty": 2048, "schedule_type": "fixed_linear"}
LEGACY |= {"schedule_config": {"total_curriculum_step": 110_000, "difficulty_step": 8}}
DISCRETE = {"schedule_type": "fixed_discrete"}
DISCRETE |= {"schedule_config": {"difficulty": [512, 1030, 2048], "max_step": [1000, 2000]}}


def translated(given, tmp_path, capsys, *flags):
    """The settings of the command line that is printed, by train.py's own reading, and the rest."""
    (tmp_path / "ds.json").write_text(json.dumps(given))
    assert not migrate.main(["deepspeed", str(tmp_path / "ds.json"), *flags])
    command, *notes = capsys.readouterr().out.splitlines()
    python, name, *words = shlex.split(command)
    assert (python, name) == ("python", "train.py")
    return flattened(config.build(config.parse(words))), notes


def test_the_gpt_recipe(tmp_path, capsys):
    got, notes = translated(GPT, tmp_path, capsys, "--tokens", "300B")
    wanted = {
        "optim.tokens": 300 * 10**9,
        "optim.batch_tokens": 512 * 2048,
        "data.seq_len": 2048,
        "model.layers": 24,
        "run.seed": 1234,
        "run.dtype": "fp16",
        "curriculum.metric": "rarity,seqlen",
        "curriculum.start": "1,80",
        "curriculum.pace": "root:3.56,root:1.78",
        "curriculum.by": None,
        "ltd.start": 128,
        "ltd.steps": 200_000,
        "ltd.multiple": 16,
        "ltd.pace": "linear",
        "ltd.layers": ",".join(map(str, range(1, 23))),
    }
    assert {name: got[name] for name in wanted} == wanted
    said = {note.split(":")[0].split(".")[-1] for note in notes}
    assert said == {"hysteresis", "data_cluster_path", "num_workers", "index_to"} | {
        "model_mask_name",
        "hidden_state_order",
        "py's own",
        "not in the file, DeepSpeed's own",
    }


@pytest.mark.parametrize(
    ("rows", "row", "metric", "ltd", "steps", "budget", "all_steps"),
    [  # steps of whole runs as Megatron's accounting has them: the rest of a run has full rows
        (512, 2048, length(), {}, 110_000, 300e9, 339_169),
        (512, 2048, None, dropping(), 200_000, 300e9, 372_789),
        (512, 2048, length(), dropping(), 200_000, 300e9, 377_264),
        (1024, 512, length(128, 512, 960_000), {}, 960_000, 1049e9, 2_367_500),
    ],
)
def test_steps_consume_what_the_published_runs_do(rows, row, metric, ltd, steps, budget, all_steps):
    wanted = budget - (all_steps - steps) * rows * row
    got = rows * migrate.consumed(steps, row, {"seqlen": metric} if metric else {}, ltd)
    assert got == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize(("ltd", "degree"), [(dropping(), "1.78"), ({}, "1.9")])
def test_rows_are_about_as_long_as_deepspeed_s_at_the_same_step(ltd, degree):
    """Over the whole curriculum; the clock advances by our own rows."""
    metric, row, budget = length(), 2048, 300e9 / 512

    def share(steps):
        return migrate.consumed(steps, row, {"seqlen": metric}, ltd) / budget

    def apart(pacing):
        ours = parse_pace(pacing)._replace(start=80, end=row, multiple=8)
        consumed, distances = 0, []
        for step in range(0, 110_000, 100):
            seen = ours.at(consumed / budget / float(words["-share"]))
            kept = min(seen, pace(step, 200_000, 128, row, multiple=16)) if ltd else seen
            consumed += 100 * (seen - (seen - kept) * 22 / 24)
            distances.append(abs(seen - migrate.difficulty(metric, step)))
        return max(distances)

    words = migrate.paced("seqlen", metric, row, share)
    assert words["-pace"] == f"root:{degree}" and apart(words["-pace"]) <= 64
    assert apart("linear") > 800  # the share of the end alone does not keep pace


def scheduler(kind, **params):
    return {"optimizer": ADAM, "scheduler": {"type": kind, "params": params}}


LEVELS = "pace': 'discrete:512@0.003495:1024@0.006991:2048'"
VALUE = {"difficulty_type": "value", "min_difficulty": 900}
SINGLE = {"clustering_type": "single_cluster"}
CLOCK = {"layer_token_lr_schedule": {"enabled": True}}
TO_CPU = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
SILENT = {"optimizer": {"type": "AdamW", "params": {"lr": 6e-4}}}


@pytest.mark.parametrize(
    ("change", "wanted"),  # in the settings that train.py reads, then in the notes
    [
        ({"metrics": {"seqlen_reshape": length() | DISCRETE}}, "'seqlen-reshape'.*" + LEVELS),
        ({"curriculum_learning": LEGACY}, "metric': 'seqlen',.*share': '0.199',.*'root:1.9'"),
        ({"metrics": {"voc": VOC | VALUE}}, "start': '900',.*share': '0.3845',.*by': 'value'"),
        ({"metrics": {"voc": VOC | {"max_difficulty": 10}}}, "start': '10'"),
        ({"metrics": {"seqlen": VOC}}, "'bert'.*metric': 'length'.*for a GPT put --pack"),
        ({"metrics": {"seqlen": VOC}, "ltd": dropping()}, "'gpt'.*'length'.*pack.on': True"),
        ({"metrics": {"vocabularyrarity": VOC}}, "'gpt'.*metric': 'rarity'"),
        ({"metrics": {"voc": VOC | {"schedule_type": "custom"}}}, "start': '1',.*voc: .* left out"),
        ({"metrics": {"mine": VOC}}, "metric': 'none'.*mine: left out of the command"),
        ({"metrics": {"voc": VOC | SINGLE}}, "metric': 'none'.*voc: left out of the command"),
        ({"ltd": dropping(12, "encoder", 512) | CLOCK}, "'bert'.*'layer-tokens'.* padding counts"),
        ({"optimizer": ADAM}, "'adamw'.*decay': 0.01,.*beta2': 0.999.*optimizer.params.lr: auto"),
        (
            SILENT,
            "own: --beta1 0.9, --beta2 as in --help, --weight-decay 0.1, --grad-clip 1.0, --warmup",
        ),
        (
            scheduler("WarmupLR", warmup_max_lr=3e-4),
            "lr': 0.0003, 'optim.min_lr': 1.0, .* is linear",
        ),
        (
            scheduler("WarmupDecayLR", warmup_num_steps=3000),
            "'linear'.*warmup_tokens': 3145728000,",
        ),
        (
            scheduler("WarmupCosineLR", cos_min_ratio=0.1),
            "min_lr': 0.1, 'optim.schedule': 'cosine'",
        ),
        (scheduler("OneCycle"), "scheduler: warmup is linear"),
        ({"wandb": {"enabled": True, "team": "x"}}, "wandb': True.*wandb: .*WANDB_PROJECT"),
        ({"tensorboard": {"enabled": True, "job_name": "x"}}, "board': True.*tensorboard: the log"),
        ({"zero_optimization": TO_CPU}, "offload.on': True.*only stage 3 .*--offload-budget"),
    ],
)
def test_other_configurations(change, wanted, tmp_path, capsys):
    flags = ("--tokens", "300B", "--seq-len", "512" if "encoder" in str(change) else "2048")
    assert re.search(wanted, str(translated(deepspeed(**change), tmp_path, capsys, *flags)))


def test_any_value_is_translated_or_named():
    """Each value of a configuration, and each object, replaced by what does not belong there."""
    whole = GPT | scheduler("WarmupLR", warmup_num_steps=9) | {"zero_optimization": TO_CPU}
    keys = [path.split(".") for path, _ in migrate.leaves(whole)]
    keys += [key[:depth] for key in keys for depth in range(1, len(key))]
    for key, value in itertools.product(keys, ("x", 5, -1, 0.5, [], [1], {}, None, True)):
        given = copy.deepcopy(whole)
        functools.reduce(dict.get, key[:-1], given)[key[-1]] = value
        try:
            migrate.deepspeed(given, 300 * 10**9, None)
        except ValueError as error:
            assert re.search("allowed is|--|one entry more", str(error)), (key, value)
        except KeyError as error:  # what `main` names
            assert value == {}, (key, value, error)


@pytest.mark.parametrize(
    ("given", "flags", "problem"),
    [
        ("{", "", "Expecting property name"),
        ("[1]", "", "no configuration"),
        ({"curriculum_learning": 5}, "", "no configuration"),
        (GPT | {"train_batch_size": "auto"}, "", "train_batch_size, a number"),
        (deepspeed(metrics={"voc": VOC}), "--tokens 1B", "--seq-len: give both"),
        (GPT, "", "add --tokens"),
        (GPT, "--tokens 1M", "110,000 steps of a curriculum are 3.84e.04 times --tokens"),
        (
            GPT | {"gradient_clipping": "1 --out x"},
            "--tokens 300B",
            "gradient_clipping is .*a number",
        ),
        (deepspeed(ltd={"enabled": True}), "", "needs the key 'random_ltd_schedule'"),
    ],
)
def test_bad_input_is_one_line(given, flags, problem, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(given if isinstance(given, str) else json.dumps(given))
    with pytest.raises(ValueError, match=problem) as refused:
        migrate.main(["deepspeed", str(file), *flags.split()])
    assert str(refused.value).startswith(str(file))


def test_the_page_has_every_key():
    page = read("docs/migrate.md")
    keys = [key.split(".")[-1] for key in (*migrate.FLAGS, *migrate.REASONS, *migrate.METRICS)]
    metric = copy.deepcopy(LEGACY) | VOC | {"schedule_config": 0}
    keys += [*metric, *DISCRETE["schedule_config"], "total_curriculum_step", "root_degree"]
    assert not [key for key in keys if key != "*" and not re.search(rf"\b{key}", page)]
