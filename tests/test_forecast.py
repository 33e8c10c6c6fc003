"""What a run is said to take is what it takes; saying so makes nothing.

python -m pytest tests/test_forecast.py
"""

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import ALL_ON, SMALL, bytes_taken, contents, names, needs_triton, start_ranks

import config
import dry_run
import model
import train
from data import open_data
from dry_run import Point, due_at, picks, real_tokens, seconds_of_steps, total, walk
from kernels import cross_entropy
from model import TransformerConfig
from plan import Plan
from support.base.clock import Clock, Cursor, blocks_at, due
from support.base.runtime import Runtime
from support.rows.batch import Batch
from support.step import machine, memory, sizes
from support.step.flops import work_of
from support.step.optim import Optimizers
from support.step.sizes import empty_model
from support.weights.initial import model_size

ONE = Runtime(0, 1, torch.device("cpu"), torch.float32, "")
SETS = {
    "plain": "",
    "all on": ALL_ON,
    "rows that grow": "--curriculum seqlen --curriculum-start 8 --tokens 2048",
    "documents": "--pack --pack-batch documents --micro-batch-size 2 --tokens 2048",
    "bert": "--model bert --ltd --ltd-start 16 --tokens 2048",
    "fewer layers": "--pseudo --pseudo-layers 2 --pseudo-until 0.5 --tokens 2048",
}


LLAMA = "--block llama --kv-heads 1 --qk-norm --no-tied"


def planned(flags: str, store_dir, samples: int | None = None, clock: Clock | None = None):
    line = f"{SMALL} --data {store_dir} {flags}"
    settings, data = open_data(config.build(config.parse(line.split())), ONE)
    plan = Plan(settings, data.store, data.special_ids, ONE)
    shape = config.transformer_config(settings, *model_size(settings, data.encoding))
    at_once = settings.optim.micro_batch_size or 8

    def work_at(step):
        return work_of(settings, ONE, shape, at_once, blocks_at(settings, step.context))

    return walk(plan, work_at, clock or Clock(), samples)


def totals(points: list[Point]) -> list[float]:
    sums = [total(points, of) for of in (lambda p: p.flops, lambda p: p.step.pieces)]
    return [total(points), real_tokens(points), *sums]


@pytest.mark.parametrize("name", SETS)
def test_the_steps_planned_are_those_of_the_run(name, log_of, store_dir):
    lines = [line for line in log_of(SETS[name]) if line["event"] == "train"]
    points, last = planned(SETS[name], store_dir), lines[-1]
    pieces = sum(line["pieces"] for line in lines)
    assert totals(points) == [last["step"], last["real_tokens"], last["flops"], pieces]
    kept = [point.step.kept_tokens for point in points]
    assert kept == [line["kept_tokens"] for line in lines]
    few = planned(SETS[name], store_dir, dry_run.OUTLOOK_STEPS)
    assert len(few) == dry_run.OUTLOOK_STEPS, "what a start says without planning all"
    assert totals(few)[:3] == pytest.approx(totals(points)[:3], rel=0.15)


def test_a_run_that_goes_on_is_forecast_from_where_it_stands(log_of, store_dir):
    lines = [line for line in log_of("") if line["event"] == "train"]
    middle = lines[4]
    fields = {name: middle[name] for name in ("step", "consumed_tokens", "real_tokens", "flops")}
    rest = planned("", store_dir, clock=Clock(**fields, cursor=Cursor(first_draw=5)))
    assert rest[0].step.before.step == 5 and total(rest) == len(lines) - 5
    assert total(rest, lambda p: p.flops) == lines[-1]["flops"] - middle["flops"]
    assert planned("", store_dir, clock=Clock(consumed_tokens=4096)) == []


def dry(flags: str, store_dir, capsys) -> str:
    assert train.main(f"{SMALL} --data {store_dir} {flags} --dry-run".split()) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [f"{ALL_ON} --out there", "--model bert --offload --offload-budget 400KB"]
)
def test_a_dry_run_says_it_and_leaves_nothing(flags, store_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dry_run, "TURNS", 2)
    out = dry(f"{flags} --tokens 2048", store_dir, capsys)
    assert not list(tmp_path.iterdir())
    for said in ("M parameters with", "320, cpu", "GB free", "work: about", "time: about"):
        assert said in out
    assert re.search(r"steps: \d+; [\d,]+ pieces of text, [\d,]+ tokens, [\d.]+ epochs", out)
    schedule = out[out.index("progress") :].split("\n\n")[0].splitlines()
    assert 8 <= len(schedule) <= 12 and schedule[1].split()[1] == "0"


def test_a_dry_run_of_a_run_that_is_there_leaves_it_as_it_is(run, tmp_path, store_dir, capsys):
    run("--tokens 1024 --checkpoint-every 512 --eval-every 512")
    folder = tmp_path / "run"
    sorted(folder.glob("step-*.pt"))[-1].unlink()
    (folder / "best.pt").unlink()
    before = contents(folder)
    assert train.main(f"--resume --out {folder} --data {store_dir} --dry-run".split()) == 0
    assert contents(folder) == before
    assert "steps: 2;" in capsys.readouterr().out


def test_text_that_is_repeated_often_is_warned_of(store_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda *_: None)
    monkeypatch.setattr(train, "finish", lambda *_: None)
    for tokens, expected in ((2_000_000, False), (4_000_000, True)):
        line = f"{SMALL} --data {store_dir} --tokens {tokens} --warmup-tokens 0 --out {tokens}"
        assert train.main(line.split()) == 0
        out = capsys.readouterr().out
        assert ("more than 4 times" in out) == expected
        assert out.count("memory:") == 1 and "FLOP in matrix products" in out
    assert "5.86 epochs of 682,416 training tokens" in out


@pytest.mark.parametrize(
    ("tokens", "often"), [(19_000, "at most 5 times: a smaller --batch-tokens"), (22_000, "")]
)
def test_a_curriculum_that_hardly_moves_is_warned_of(tokens, often, store_dir, capsys):
    out = dry(f"--pack --curriculum seqlen --tokens {tokens} --on T4", store_dir, capsys)
    assert ("--curriculum moves once in about 16 packed steps" in out) == bool(often)
    assert often in out
    unpacked = dry(f"--curriculum seqlen --tokens {tokens} --on T4", store_dir, capsys)
    assert "--curriculum moves" not in unpacked


def test_what_does_not_fit_is_said_and_not_tried(store_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begin = train.start
    monkeypatch.setattr(train, "start", lambda *a: replace(begin(*a), device_free=1_000_000))
    monkeypatch.setattr(train, "assemble", pytest.fail)
    out = dry("", store_dir, capsys)
    assert (
        "time: unknown" in out and "1 at once a rank (8 would take more than the 0.0 GB that" in out
    )


def test_what_takes_long_is_not_timed(store_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dry_run, "TURNS", 1)
    assert train.main(f"{SMALL} --data {store_dir} --dry-run".split()) == 0
    assert capsys.readouterr().err.startswith("timing micro-batches")
    monkeypatch.setattr(dry_run, "LONG", 0.0)
    monkeypatch.setattr(train, "assemble", pytest.fail)
    out = dry("", store_dir, capsys)
    assert "time, assumed and not measured: about" in out and "at --mfu 0.75 of" in out


@pytest.mark.parametrize("name", ["all on", "rows that grow", "fewer layers"])
def test_what_reads_and_what_costs_as_much_as_the_plain_run_is_said(name, store_dir, capsys):
    flags = f"{SETS[name]} --tokens 8192"
    (line,) = [said for said in dry(flags, store_dir, capsys).splitlines() if "plain run" in said]
    tokens = [int(float(n) * 1000) for n in re.findall(r"--tokens ([\d.]+)K", line)]
    plain = planned("--tokens 8192", store_dir)
    for budget, of in zip(tokens, (dry_run.tokens_read, dry_run.flops_of), strict=True):
        found = total(planned(f"{SETS[name]} --tokens {budget}", store_dir), of)
        assert found == pytest.approx(total(plain, of), rel=0.08), line


def test_a_run_says_it_at_its_start_too(store_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda *_: None)
    monkeypatch.setattr(train, "finish", lambda *_: None)
    line = f"{SMALL} --data {store_dir} {SETS['rows that grow']} --tokens 8192"
    assert train.main(line.split()) == 0
    start = capsys.readouterr().out
    plan = dry(f"{SETS['rows that grow']} --tokens 8192", store_dir, capsys)
    both = [re.findall(r"--tokens ([\d.]+)K", said) for said in (start, plan)]
    assert len(both[0]) == 2
    for one, other in zip(*both, strict=True):
        assert float(one) == pytest.approx(float(other), rel=0.05)
    about = "0.07 M parameters with a vocabulary of 320"
    assert about in start and about in plan


def test_many_epochs_are_said_first_and_in_red(store_dir, capsys, monkeypatch):
    def first() -> str:
        return dry("--tokens 4M --batch-tokens 16384 --on T4", store_dir, capsys).splitlines()[0]

    assert first().startswith("6 epochs: text that is read more than 4 times")
    monkeypatch.setattr(dry_run.sys.stdout, "isatty", lambda: True)
    assert first().startswith("\033[31m6 epochs") and first().endswith("\033[0m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert first().startswith("6 epochs")


# ---- machines that are not here


def test_a_machine_that_is_not_here_is_planned_for_and_nothing_is_made(
    store_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "assemble", pytest.fail)
    monkeypatch.setattr(machine, "measured_peak", pytest.fail)
    of_mfu = {}
    for mfu in (0.2, 0.4):
        on = "--on 4xflops=1e10,memory=16GB,link=1GB"
        out = dry(f"{on} --tokens 200K --optimizer adamw --mfu {mfu}", store_dir, capsys)
        assert "8 rows of 32 a step, 2 at once a rank" in out and "which fits" in out
        of_mfu[mfu] = float(re.search(r"measured: about ([\d.]+) s", out)[1])
    flops = total(planned("--tokens 200K --optimizer adamw", store_dir), dry_run.flops_of)
    assert of_mfu[0.2] == pytest.approx(flops / (4 * 1e10 * 0.2), rel=0.03)
    assert of_mfu[0.4] == pytest.approx(of_mfu[0.2] / 2, rel=0.03)
    out = dry("--on 2xT4", store_dir, capsys)
    assert "planned for 2 x T4 (16 GB, 65.0 TFLOP/s in fp16, link 16 GB/s)" in out
    weights = {}
    for flags in ("", "--fsdp"):
        out = dry(f"{flags} --on 2xH100", store_dir, capsys)
        weights[flags] = float(re.search(r"weights ([\d.]+) MB", out)[1])
    assert weights["--fsdp"] == pytest.approx(weights[""] / 2, abs=0.1)
    assert not list(tmp_path.iterdir())
    assert train.main(["--size", "124M", "--dry-run", "--on", "H100"]) == 0
    assert "124.48 M parameters with a vocabulary of 50,304" in capsys.readouterr().out


def test_what_does_not_fit_comes_with_what_would(store_dir, capsys):
    flags = "--layers 40 --optimizer adamw --micro-batch-size 2"
    on = "--on 2xflops=1e12,memory={},link=1GB"
    out = dry(f"{flags} {on.format('6MB')}", store_dir, capsys)
    singles = re.findall(r"^  (--\S+(?: \d+)?) (does not fit|fits): ([\d.]+) GB", out, re.M)
    assert [flag for flag, _, _ in singles][:3] == [
        "--micro-batch-size 1",
        "--fsdp",
        "--checkpoint-activations",
    ]
    assert "DOES NOT FIT" in out
    for flag, _, size in singles[:3]:
        alone = flags.replace("--micro-batch-size 2", "") if "micro" in flag else flags
        again = dry(f"{alone} {flag} {on.format('6MB')}", store_dir, capsys)
        assert f"about {size} GB of" in again
    (winner,) = re.findall(r"^  (--\S+.*--\S+.*) fits: ", out, re.M)
    again = dry(f"--layers 40 --optimizer adamw {winner} {on.format('6MB')}", store_dir, capsys)
    assert "which fits" in again
    out = dry(f"{flags} {on.format('9KB')}", store_dir, capsys)
    assert "nothing of it makes this run fit" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--on 8xH101 --dry-run", "known are B200, .* as in 8xH100"),
        ("--on flops=1e12,memory=1GB --dry-run", "1GB: describe a device by all three of"),
        ("--on flops=many,memory=1GB,link=1GB --dry-run", "flops=many is not FLOP/s"),
        ("--on flops=1,memory=big,link=1GB --dry-run", "memory big: write an amount"),
        ("--on 0xH100 --dry-run", "has no device"),
        ("--on T4 --dtype bf16 --dry-run", "no matrix units for bf16: add --dtype fp16"),
        ("--on 3xT4 --dry-run", "not a multiple"),
        ("--on T4", "only plans: add --dry-run"),
        ("--mfu 1.5 --dry-run", "--mfu is 1.5, allowed"),
    ],
)
def test_a_machine_that_cannot_be_planned_for_is_refused(flags, said, store_dir):
    with pytest.raises(ValueError, match=said):
        train.main(f"{SMALL} --data {store_dir} {flags}".split())


@pytest.mark.slow
@pytest.mark.dist
def test_several_ranks_leave_nothing_either(store_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"{SMALL} --data {store_dir} --dry-run --ltd --ltd-start 16"
    start_ranks(2, line.split(), f"{line} --fsdp".split())
    assert names(tmp_path) == []


# ---- memory


@pytest.mark.parametrize("flags", ["", "--optimizer adamw", "--model bert --nsp", "--pos learned"])
def test_weights_gradients_and_state_are_counted_exactly(flags):
    settings = config.build(config.parse(f"{SMALL} {flags}".split()))
    shape = config.transformer_config(settings, 320)
    o, model = settings.optim, train.Transformer(shape)
    optimizers = Optimizers(dict(model.named_parameters()), o.optimizer, 0.1, (0.9, 0.95))
    wanted = optimizers.memory()
    is_muon, empty = o.optimizer == "muon", dict(empty_model(shape).named_parameters())
    assert memory.state_bytes(empty, is_muon) == wanted
    found = memory.memory_of(settings, ONE, 4, shape)._asdict()
    assert {name: found[name] for name in wanted} == wanted
    halves = memory.state_bytes(empty, is_muon, shards=2)
    assert halves["weights"] == pytest.approx(wanted["weights"] / 2, rel=0.01)


class Odd(model.Block):
    """A fork's: with another norm and a gated MLP at its end."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = torch.nn.RMSNorm(config.width)
        self.gate = torch.nn.Linear(config.width, 2 * config.width)
        self.out = torch.nn.Linear(config.width, config.width)

    def forward(self, x, meta):
        x = super().forward(x, meta)
        one, two = self.gate(self.norm(x)).chunk(2, -1)
        return x + self.out(torch.nn.functional.silu(one) * two)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "flags", ["", "--pos learned", "--model bert", "--checkpoint-activations", "--width 96", LLAMA]
)
def test_activations_are_those_that_autograd_keeps(flags, half, monkeypatch):
    """Of rotary and learned positions, of blocks that run twice, and of a block that is new."""
    if "96" in flags:  # a shape that no other test counts
        monkeypatch.setattr(model, "Block", Odd)
    settings = config.build(config.parse(f"--layers 4 --width 64 --heads 2 {flags}".split()))
    shape = config.transformer_config(settings, 320)
    net, T = train.Transformer(shape), settings.data.seq_len
    assert sum(p.numel() for p in net.parameters()) == sizes.parameter_count(shape)
    matrices = [p for p in net.h[0].parameters() if p.ndim > 1]
    assert sum(p.numel() for p in matrices) == sizes.weights_of_block(shape), "a fork's too"

    def kept(rows: int) -> int:
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
            return tensor

        run_block = train.run_block_of(settings, {}, None, 0, Batch.blank(rows, T))
        tokens, hooks = torch.randint(300, (rows, T)), torch.autograd.graph.saved_tensors_hooks
        with hooks(pack, lambda tensor: tensor), torch.autocast("cpu", enabled=half):
            assert net.hidden_states(tokens, run_block=run_block).requires_grad
        return sum(storage.nbytes() for storage in storages.values())

    rerun = settings.run.checkpoint_activations
    found, said = kept(6) - kept(3), memory.activation_bytes(shape, 3, T, half, recomputed=rerun)
    if rerun:
        said -= memory.activation_bytes(replace(shape, layers=1), 3, T, half)
        said += 3 * T * 4 * shape.width
    assert said == pytest.approx(found, rel=0.1), flags


@pytest.mark.parametrize("form", ["float32", "chunked", "triton"])
def test_what_the_loss_needs_is_what_it_takes(form, monkeypatch):
    """Its chunk of logits, in 16 bits as either form has them, and its gradients; no copy of any
    in the backward pass."""
    half = form != "float32"
    shape = TransformerConfig("gpt", 1, 1, 16, 64, 64, 4992)
    for module in (cross_entropy, memory):
        name = "chosen_impl" if module is cross_entropy else "chosen_loss"
        monkeypatch.setattr(module, name, lambda *_: form if half else "chunked")
    if form == "triton":
        needs_triton()
        # a GPU adds the product to the gradient without an array of its own
        monkeypatch.setattr(cross_entropy, "add_product", lambda out, a, b: None)
    x, weight = torch.randn(64, 16).requires_grad_(), torch.randn(4992, 16).requires_grad_()

    def loss_and_gradients():
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = cross_entropy.linear_cross_entropy(x, weight, None, torch.arange(64))
        torch.autograd.grad(loss, (x, weight))

    # some CPUs' products in 16 bits take an array for themselves
    logits, matrix = torch.zeros(64, 4992).bfloat16(), torch.zeros(4992, 16).bfloat16()
    of_product = bytes_taken(lambda: logits @ matrix) - 2 * x.numel() if form == "triton" else 0
    found = bytes_taken(loss_and_gradients) - of_product
    here = replace(ONE, dtype=torch.bfloat16 if half else torch.float32)
    casts = 2 * weight.numel() if half else 0  # of the weight: counted as temporary
    assert memory.logits_bytes(shape, 64, here) + casts == pytest.approx(found, rel=0.05)


def test_more_rows_are_taken_at_once_where_there_is_room(monkeypatch):
    settings = config.build(config.parse(["--size", "124M", "--device", "cpu"]))

    def needed(settings, runtime, rows, *_):
        return SimpleNamespace(on_device=1000 * rows)

    monkeypatch.setattr(memory, "memory_of", needed)
    shape = config.transformer_config(settings, 320)

    def at_once(free: int | None) -> int:
        return memory.micro_batch(settings, replace(ONE, device_free=free), shape).count

    assert [at_once(free) for free in (100, 2_000, 4_000, 5_000, 10**9)] == [1, 1, 2, 4, 4]
    assert at_once(None) == 4, "nobody knows"


# ---- time


def point(number: int, part_flops: float, parts: int = 1, stands_for: float = 1.0) -> Point:
    step = SimpleNamespace(before=Clock(step=number))
    return Point(step, stands_for, 1, 1, 1, parts, part_flops)


def test_steps_take_the_sum_of_their_parts():
    """Micro-batches of 10, 20 and 40 FLOPs take 1, 3 and 4 s."""
    parts = {10: 1, 40: 4, 20: 3}
    for flops, seconds in ((10, 1), (15, 2), (30, 3.5), (40, 4)):
        assert seconds_of_steps([point(0, flops)], parts, update=0.5) == seconds + 0.5
    points = [point(0, 10, parts=3), point(50, 20, stands_for=2)]
    assert seconds_of_steps(points, parts, update=0.5) == 3 * 1 + 0.5 + 2 * 3.5


def test_micro_batches_to_time_are_the_cheapest_the_middle_and_the_dearest():
    assert len(picks([point(n, 100) for n in range(50)])) == 1
    costs = [7, 3, 5, 1, 9]
    chosen = picks([point(n, cost) for n, cost in enumerate(costs)])
    assert [p.part_flops for p in chosen] == [5, 1, 9], "in the order of the run"


@pytest.mark.parametrize("every", [(2048, 1024), (700, 0), (0, 1024)])
def test_evaluations_and_checkpoints_are_counted_as_they_are_due(every):
    settings = config.build(config.parse(SMALL.split()))
    steps = list(pairwise(Clock(consumed_tokens=n) for n in range(0, 4097, 64)))
    for chosen in (every[:1], every):
        due_in = [any(due(n, a, b) for n in chosen) or b is steps[-1][1] for a, b in steps]
        assert len(due_at(settings, 0, *chosen)) == sum(due_in)


# ---- the peak


def test_a_data_sheet_is_known_by_the_devices_name():
    sheets = {
        "NVIDIA H100 80GB HBM3": (989.4, 494.7),
        "NVIDIA H100 PCIe": (756, 378),
        "NVIDIA L4": (121, 60),
        "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    }
    for name, (half, single) in sheets.items():
        assert machine.data_sheet(name, torch.bfloat16) == half * 1e12
        assert machine.data_sheet(name, torch.float32) == single * 1e12
    for name in ("NVIDIA L40", "NVIDIA T400", "Quadro", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert machine.data_sheet(name, torch.bfloat16) is None
    assert machine.data_sheet("Tesla T4", torch.bfloat16) is None
    assert machine.data_sheet("Tesla T4", torch.float16) == 65e12


def test_the_log_says_how_fast_a_run_is(log_of):
    lines = log_of("")
    about = lines[0]
    assert about["train_tokens"] == 682_416 and about["peak_flops"] > 1e8
    assert "measured" in about["peak_why"]
    for line in [line for line in lines if line["event"] == "train"]:
        assert line["tokens_per_s"] == pytest.approx(256 / line["ms"] * 1e3, rel=0.01)
        epochs = round(line["real_tokens"] / 682_416, 4)
        assert 0 <= line["mfu"] < 2 and line["epochs"] == epochs
    (sample,) = [line for line in lines if line["event"] == "sample"]
    assert sample["step"] == lines[-1]["step"] and isinstance(sample["text"], str)
