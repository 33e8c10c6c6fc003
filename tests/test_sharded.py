"""A model sharded over ranks against the same model in one process: losses, steps, checkpoints.

Each number of ranks is started once and makes all the checks, because starting takes seconds. A
check yields (what, error, limit); the ranks' own assertions end the test with their traceback.

python -m pytest tests/test_sharded.py
"""

import errno
import math
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import sample
from config import Config
from data import Data
from evaluate import Evaluation
from kernels.cross_entropy import IGNORE
from ltd import token_dropping
from model import Transformer, TransformerConfig, run_plain, run_recomputed
from support.base import runtime, sharded
from support.base.runtime import Runtime
from support.base.sharded import rows_here
from support.evaluation.scoring import own_rows
from support.rows.batch import Batch
from support.run import checkpoint, sharded_checkpoint
from support.step.muon import Muon
from support.text.store import Store
from support.text.tokenizer import byte_lengths, get_encoding
from train import run_once

ROWS = 6  # of a step: 3 or 2 on a rank, one after the other
MOST = 0.02  # norm of a gradient that is clipped
CPU = torch.device("cpu")
T, V = 24, 65  # 65 rows of the embedding, which neither 2 nor 3 ranks share evenly


class Skipped(nn.Module):
    """A layer without parameters of its own."""

    def forward(self, x: Tensor, meta: object) -> Tensor:
        return x


def gpt(vocab_size: int = V, seq_len: int = T) -> Transformer:
    shape = (4, 2, 16, 64, seq_len, vocab_size, "rope")
    return started(Transformer(TransformerConfig("gpt", *shape)))


def gpt_with_shared_block() -> Transformer:
    model = started(Transformer(TransformerConfig("gpt", 5, 2, 16, 64, T, V, "learned")))
    model.h[2] = model.h[3] = model.h[1]
    model.h[4] = Skipped()
    return model


def bert() -> Transformer:
    return started(Transformer(TransformerConfig("bert", 3, 2, 16, 64, T, V, "learned", nsp=True)))


def started(model: Transformer) -> Transformer:
    """Weights far from their start, where norms would all be 1 and biases 0."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.1)
    return model


MODELS = {"gpt": (gpt, ()), "shared": (gpt_with_shared_block, (1, 2, 3)), "bert": (bert, (0, 2))}


def rows_of(model: Transformer, step: int, rows: int) -> Batch:
    """Packed rows: documents of T / 3, T / 2 and the rest, which is padding."""
    random = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(V, (2, rows, T), generator=random)
    doc_ids = torch.tensor([0] * (T // 3) + [1] * (T // 2) + [-1] * (T - T // 3 - T // 2))
    positions = torch.cat([torch.arange(n) for n in (T // 3, T // 2, T - T // 3 - T // 2)])
    doc_ids, positions = doc_ids.repeat(rows, 1), positions.repeat(rows, 1)
    targets[doc_ids < 0] = IGNORE
    if model.config.nsp:
        begins = (positions == 0) & (doc_ids >= 0)
        targets[begins] = torch.randint(2, (int(begins.sum()),), generator=random)
    return Batch(tokens, targets, positions, doc_ids)


class Optimizers:
    """Muon for the blocks' matrices, AdamW for all else; a state by the parameters' names."""

    def __init__(self, parameters: dict[str, nn.Parameter]):
        of_blocks = {n: p for n, p in parameters.items() if n.startswith("h.") and p.ndim == 2}
        fused = [p for n, p in of_blocks.items() if n.endswith("c_attn.weight")]
        others = [p for n, p in of_blocks.items() if not n.endswith("c_attn.weight")]
        rest = [p for n, p in parameters.items() if n not in of_blocks]
        groups = [{"params": fused, "fused": 3}, {"params": others}]
        # eps: where a gradient is all but zero AdamW's step is as large as elsewhere, and its
        # direction a matter of rounding
        adamw = torch.optim.AdamW(rest, lr=1e-2, eps=1e-5, weight_decay=0.1, fused=True)
        self.parts = [Muon(groups, lr=1e-2, weight_decay=0.1), adamw]
        self.parameters = parameters

    def clip(self, most: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), most)
        return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()

    def step(self) -> None:
        for part in self.parts:
            part.step()
            part.zero_grad()

    def state_dict(self) -> dict:
        kept = {p: values for part in self.parts for p, values in part.state.items()}
        return {"state": {n: dict(kept[p]) for n, p in self.parameters.items() if p in kept}}

    def load_state_dict(self, state: dict) -> None:
        for name, values in state["state"].items():
            muon, adamw = self.parts
            part = adamw if "exp_avg" in values else muon
            part.state[self.parameters[name]] = dict(values)


class Trained:
    """A model and its optimizers, on this rank's rows of a step or on all of them."""

    def __init__(self, model: Transformer, runtime: Runtime | None, offloaded: tuple = ()):
        self.model, self.runtime = model, runtime
        if runtime:
            sharded.shard(model, runtime, offloaded)
        self.optimizers = Optimizers(dict(model.named_parameters()))

    def gradients(self, step: int, rows: int, autocast=nullcontext) -> Tensor:
        """Forward and backward, a row at a time, of which layers 1 and 2 see half of the tokens."""
        batch, world_size = rows_of(self.model, step, rows), 1
        own = range(rows)
        if self.runtime:
            world_size, share = self.runtime.world_size, rows // self.runtime.world_size
            own = range(share * self.runtime.rank, share * (self.runtime.rank + 1))
        kept = torch.arange(step % 2, T, 2)[None]
        run_block = token_dropping({1: kept, 2: kept}, run_recomputed if step % 2 else run_plain)
        total = torch.zeros(())
        for row in own:
            if self.runtime:
                sharded.sync_gradients(self.model, row == own[-1])
            with autocast():
                loss = self.model(batch.rows(slice(row, row + 1)), run_block=run_block)
            (loss * world_size / (rows * T)).backward()
            total += loss.detach() / (rows * T)
        return self.runtime.reduce(total) if self.runtime else total

    def step(self, step: int, rows: int) -> tuple[float, float]:
        loss = self.gradients(step, rows).item()
        norm = self.optimizers.clip(MOST)
        self.optimizers.step()
        return loss, norm

    def state(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "step": 1,
            "best": math.inf,
            "config": {"layers": (1, 2), "argv": ["--fsdp"]},
        }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((whole(ours[name]) - whole(theirs[name])).abs().max().item() for name in ours)


def check_steps(runtime: Runtime) -> Iterator[tuple[str, float, float]]:
    """With accumulation, clipping, packed rows, dropped tokens; every second step recomputed.

    In float64, because gradients are summed in another order, and Muon makes the smallest singular
    values of a gradient, rounding errors included, as large as all others.
    """
    for name, (build, offloaded) in MODELS.items():
        models = build().double(), build().double()
        ours, alone = Trained(models[0], runtime, offloaded), Trained(models[1], None)
        held = sum(rows_here(p).numel() for p in ours.model.parameters())
        total = sum(p.numel() for p in alone.model.parameters())
        yield f"{name}: share of the weights", held / total - 1 / runtime.world_size, 0.04
        for step in range(2):
            (loss, norm), (its_loss, its_norm) = ours.step(step, ROWS), alone.step(step, ROWS)
            assert norm > MOST, "nothing is clipped"
            yield f"{name}: loss {step}", abs(loss - its_loss), 1e-6
            yield f"{name}: norm {step}", abs(norm - its_norm), 1e-6
        yield f"{name}: weights", distance(ours.model.state_dict(), alone.model.state_dict()), 1e-6
        yield from check_evaluation(name, ours.model, alone.model)
        ours.gradients(2, ROWS)
        alone.gradients(2, ROWS)
        gradients = [
            {n: p.grad for n, p in trained.optimizers.parameters.items()}
            for trained in (ours, alone)
        ]
        yield f"{name}: gradients after an evaluation", distance(*gradients), 1e-6


def check_evaluation(
    name: str, ours: Transformer, alone: Transformer
) -> Iterator[tuple[str, float, float]]:
    batch = rows_of(ours, 9, 3)
    found = []
    with torch.no_grad():
        for model in (ours, alone):
            x = model.hidden_states(batch.tokens, *batch[2:])
            found.append([x, model.losses(batch), model.logits(batch.tokens)])
            if model.config.nsp:
                cls = (batch.positions == 0).flatten().nonzero().squeeze(1)
                found[-1].append(model.follows(x.flatten(0, 1), cls))
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        yield f"{name}: method {number}", (a - b).abs().max().item(), 1e-6


def check_refusals(runtime: Runtime) -> Iterator[tuple[str, float, float]]:
    """A gradient that is not finite on one rank is seen on every rank."""
    ours = Trained(gpt(), runtime)
    ours.gradients(0, ROWS)
    here = rows_here(ours.model.h[1].mlp.c_fc.weight.grad)
    if runtime.rank == 1:
        here[0, 0] = math.nan
    assert math.isnan(ours.optimizers.clip(1.0))
    assert runtime.gather(bool(here.isnan().any())) == [True] * runtime.world_size  # by the clip
    ours.optimizers.step()  # which frees the gradients
    sharded.sync_gradients(ours.model, False)  # control: not averaged, they do not arrive
    ours.model(rows_of(ours.model, 0, 1)).backward()
    assert all(p.grad is None for p in ours.optimizers.parameters.values())
    yield from ()


def check_places(runtime: Runtime) -> Iterator[tuple[str, float, float]]:
    """Offloaded rows are on the host wherever they came from; the meta device stands for a GPU."""
    model = gpt()
    sharded.shard(model, runtime, (1, 2))
    sharded.assign(model, model.state_dict(), torch.device("meta"))
    where = {name: p.device.type for name, p in model.named_parameters()}
    assert {name for name, device in where.items() if device == "cpu"} == {
        name for name in where if name.startswith(("h.1.", "h.2."))
    }
    yield from ()


def check_skipped_layer(runtime: Runtime) -> Iterator[tuple[str, float, float]]:
    """A layer that a step leaves out has no gradient then, and stays as it is."""

    def run_block(layer, block, x, meta):
        return x if layer == skipped else block(x, meta)

    ours, alone = Trained(gpt().double(), runtime), Trained(gpt().double(), None)
    for step, skipped in enumerate((1, 2, None)):
        for trained in (ours, alone):
            batch = rows_of(trained.model, step, runtime.world_size)
            if trained is ours:
                batch = batch.rows(slice(runtime.rank, runtime.rank + 1))
            own_share = 1 if trained is ours else 1 / runtime.world_size
            (trained.model(batch, run_block=run_block) * own_share).backward()
            if skipped:
                assert trained.model.h[skipped].ln_1.weight.grad is None
            trained.optimizers.step()
    yield "skipped", distance(ours.model.state_dict(), alone.model.state_dict()), 1e-6


def check_rounded(runtime: Runtime) -> Iterator[tuple[str, float, float]]:
    """Gathered in bf16, with the norms in fp32 as a GPU's autocast has them."""
    bf16 = Runtime(runtime.rank, runtime.world_size, runtime.device, torch.bfloat16, "")
    plain_precision, plain_norm = sharded.precision, F.layer_norm
    plain_kind = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    as_gathered_in_fp32, alone, exact = (Trained(gpt(), r) for r in (bf16, None, None))

    def norm_in_fp32(x, shape, weight, bias, eps):
        return plain_norm(x.float(), shape, weight.float(), bias.float(), eps)

    F.layer_norm, sharded.precision = norm_in_fp32, lambda _: plain_precision(plain_kind)
    try:
        as_on_gpu = Trained(gpt(), bf16)
        models = (as_on_gpu, as_gathered_in_fp32, alone)
        for trained in models:
            trained.gradients(0, ROWS, bf16.autocast)
        exact.gradients(0, ROWS)
    finally:
        F.layer_norm, sharded.precision = plain_norm, plain_precision
    truth, *found = (
        torch.cat([whole(p.grad).flatten() for p in trained.optimizers.parameters.values()])
        for trained in (exact, *models)
    )
    error = [((gradient - truth).norm() / truth.norm()).item() for gradient in found]
    assert 1e-4 < error[2], "autocast rounds"
    yield "gathered in fp32", (found[1] - found[2]).abs().max().item(), 1e-6
    yield "gathered in bf16", error[0], 1.2 * error[2]


def check_nested_registration_fails(runtime: Runtime) -> Iterator[tuple[str, float, float]]:
    """Control: registered without regard to who calls whom, a BERT's heads are freed too early."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    def plainly(model, methods):
        for name in methods:
            register_fsdp_forward_method(model, name)

    gather_around, sharded.gather_around = sharded.gather_around, plainly
    try:
        ours = Trained(bert(), runtime)
    finally:
        sharded.gather_around = gather_around
    with pytest.raises(RuntimeError, match="not allocated"):
        ours.gradients(0, ROWS)
    yield from ()


def check_text(runtime: Runtime) -> Iterator[tuple[str, float, float]]:
    """Ranks draw with other numbers, and yet all have rank 0's text."""
    encoding = get_encoding("bytes")
    ours, alone = Trained(gpt(320), runtime).model, gpt(320)
    texts = []
    for model, number in ((ours, runtime.rank), (alone, 0)):
        random = torch.Generator().manual_seed(number)
        texts.append("".join(sample.write(model, encoding, "a", 12, generator=random)))
    assert texts[0] == texts[1]
    yield from ()


def check_evaluation_of_a_store(runtime: Runtime, store: str) -> Iterator[tuple[str, float, float]]:
    """In the last turn there are rows for some ranks only."""
    encoding = get_encoding("bytes")
    data = Data(encoding, Store.open(store), None, byte_lengths(encoding))
    evaluation = Evaluation(data, 32, tokens=1000)
    at_once = next(n for n in (4, 5, 7) if -(-evaluation.rows_in_all // n) % runtime.world_size)
    ours, alone = Trained(gpt(320, 32), runtime).model, gpt(320, 32)
    found = evaluation.run(ours, runtime, at_once)
    wanted = evaluation.run(alone, sharded_checkpoint.ALONE, at_once)
    yield "bits per byte", abs(found.val_bpb - wanted.val_bpb), 1e-6
    assert found.targets == wanted.targets
    assert hasattr(ours.wte.weight, "to_local"), "freed behind the evaluation"


def check_compiled_ahead(runtime: Runtime) -> Iterator[tuple[str, float, float]]:
    """The step that --compile makes in advance leaves neither weights nor gradients changed."""
    ours = Trained(gpt(), runtime)
    before = {name: whole(p).clone() for name, p in ours.optimizers.parameters.items()}
    trainer = SimpleNamespace(model=ours.model, runtime=runtime, edits={})
    run_once(trainer, Config(), rows_of(ours.model, 0, 1))
    yield "run once", distance(ours.optimizers.parameters, before), 0.0
    assert all(p.grad is None for p in ours.optimizers.parameters.values())


def check_compiled_blocks(runtime: Runtime) -> Iterator[tuple[str, float, float]]:
    """Blocks compiled before they are sharded; by the backend that runs what it captured."""
    model = gpt()
    for block in model.h:
        block.compile(backend="eager", dynamic=None)
    ours, alone = Trained(model, runtime), Trained(gpt(), None)
    for step in range(2):
        found, wanted = ours.step(step, runtime.world_size), alone.step(step, runtime.world_size)
        yield f"compiled: loss {step}", abs(found[0] - wanted[0]), 1e-6


# ---- checkpoints


def check_failing_saves(runtime: Runtime, folder: Path) -> Iterator[tuple[str, float, float]]:
    """A save that fails on one rank fails on all, soon, and the older ones are as they were."""
    folder = folder / "failing"
    ours = Trained(gpt(), runtime)
    sharded_checkpoint.save(folder, ours.state(), runtime, step=1, best=True)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    def full_disk(*_, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    for rank, name in ((0, "write_file"), (1, "write_file"), (0, "put")):
        working = getattr(checkpoint, name)
        if runtime.rank == rank:
            setattr(checkpoint, name, full_disk)
        try:
            with pytest.raises(ValueError, match="No space left") as error:
                sharded_checkpoint.save(folder, ours.state(), runtime, step=2, keep=1)
        finally:
            setattr(checkpoint, name, working)
        assert "step-00000002.sharded: not written" in str(error.value)
        assert "older ones are untouched" in str(error.value)
        dist.barrier()
        after = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        assert after == before and len(list(folder.iterdir())) == 2
        dist.barrier()
    if runtime.rank == 1:
        rows_here(ours.model.wte.weight.detach())[0] = math.nan
    with pytest.raises(ValueError, match=r"not finite: wte\.weight"):
        sharded_checkpoint.save(folder, ours.state(), runtime, step=2)
    yield from ()


def check_damage_is_said_by_all(
    runtime: Runtime, folder: Path
) -> Iterator[tuple[str, float, float]]:
    """Each file is verified by one rank only, yet no rank reads from a damaged folder, or file."""
    folder = folder / "damaged"
    ours = Trained(gpt(), runtime)
    path = sharded_checkpoint.save(folder, ours.state(), runtime, step=1)
    if runtime.is_rank0:
        checkpoint.save(folder, sharded_checkpoint.load(path), step=2)
    dist.barrier()
    files = [*sorted(path.iterdir()), folder / "step-00000002.pt"]
    assert [file.name for file in files] == [
        "rank-0-of-2.pt",
        "rank-1-of-2.pt",
        "step-00000002.pt",
    ]
    for file in files:
        intact = file.read_bytes()
        dist.barrier()
        if runtime.is_rank0:
            flipped = bytearray(intact)
            flipped[len(intact) // 2] ^= 4
            file.write_bytes(flipped)
        dist.barrier()
        with pytest.raises(ValueError, match=f"{file.name} is damaged"):
            named = file if file.parent == folder else path
            sharded_checkpoint.load_shards(named, ours.model.state_dict(), runtime, CPU)
        dist.barrier()
        if runtime.is_rank0:
            file.write_bytes(intact)
        dist.barrier()
    for named in (path, files[-1]):
        state = sharded_checkpoint.load_shards(named, ours.model.state_dict(), runtime, CPU)
        for name, tensor in ours.model.state_dict().items():  # bit for bit what was saved
            assert torch.equal(rows_here(state["model"][name]), rows_here(tensor))
    yield from ()


def go_on(runtime: Runtime, folder: Path, write: bool) -> Iterator[tuple[str, float, float]]:
    """A step, a checkpoint, two steps; with other ranks the last two steps again from there."""
    for name in ("shared", "bert"):
        build, offloaded = MODELS[name]
        alone = Trained(build(), None)
        losses = [alone.step(step, ROWS)[0] for step in range(3)][1:]
        paths = [folder / name / "step-00000001.sharded"]
        if write:
            ours = Trained(build(), runtime, offloaded)
            ours.step(0, ROWS)
            sharded_checkpoint.save(folder / name, ours.state(), runtime, step=1)
        else:  # also a file of whole tensors, which each rank cuts
            state = sharded_checkpoint.load(paths[0])
            paths.append(checkpoint.save(folder / f"{name}-{runtime.rank}", state, step=1))
        for path in paths:
            ours = Trained(build(), runtime, offloaded)
            state = sharded_checkpoint.load_shards(path, ours.model.state_dict(), runtime, CPU)
            assert state["best"] == math.inf and state["config"]["layers"] == (1, 2)
            for tensor in state["optimizers"]["state"]["wte.weight"].values():
                assert rows_here(tensor).shape in (rows_here(ours.model.wte.weight).shape, ())
            yield from same_losses(name, path, ours, state, losses)
        whole_again = sharded_checkpoint.load(paths[0])
        yield from same_losses(name, "one process", Trained(build(), None), whole_again, losses)


def same_losses(
    name: str, where: Path | str, trained: Trained, state: dict, losses: list[float]
) -> Iterator[tuple[str, float, float]]:
    trained.model.load_state_dict(state["model"])
    trained.optimizers.load_state_dict(state["optimizers"])
    for step, loss in enumerate(losses, 1):
        error = abs(trained.step(step, ROWS)[0] - loss)
        yield f"{name}: loss {step}, {where}", error, 1e-6


def work(rank: int, world_size: int, meet: str, folder: str, store: str, results) -> None:
    torch.set_num_threads(1)
    try:
        runtime = Runtime(rank, world_size, torch.device("cpu"), torch.float32, "")
        if world_size == 1:
            sharded.join(runtime)
        else:
            ranks = {"rank": rank, "world_size": world_size}
            dist.init_process_group("gloo", init_method=f"file://{meet}", **ranks)
        checks = [go_on(runtime, Path(folder), write=world_size == 2)]
        if world_size > 1:
            checks += [check_steps(runtime), check_evaluation_of_a_store(runtime, store)]
        if world_size == 2:
            checks += [
                check_refusals(runtime),
                check_places(runtime),
                check_skipped_layer(runtime),
                check_rounded(runtime),
                check_text(runtime),
                check_compiled_ahead(runtime),
                check_compiled_blocks(runtime),
                check_failing_saves(runtime, Path(folder)),
                check_damage_is_said_by_all(runtime, Path(folder)),
                check_nested_registration_fails(runtime),
            ]
        results.put(([outcome for check in checks for outcome in check], ""))
    except BaseException:
        results.put(([], f"rank {rank} of {world_size}: {traceback.format_exc()}"))
    dist.destroy_process_group()


@pytest.mark.dist
def test_ranks_together_do_what_one_process_does(tmp_path, store_dir):
    """Two ranks write the checkpoints from which one and three go on."""
    context = get_context("forkserver")
    for world_size in (2, 1, 3):
        results = context.SimpleQueue()
        where = (str(tmp_path / f"meet{world_size}"), str(tmp_path), str(store_dir), results)
        ranks = [
            context.Process(target=work, args=(rank, world_size, *where))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for _ in ranks:
            outcomes, failed = results.get()
            assert not failed, failed
            assert outcomes
            for what, error, limit in outcomes:
                assert error <= limit, f"{what}: {error:.2e} with {world_size} ranks"
        for process in ranks:
            process.join()


def test_ranks_without_rows_run_a_sharded_model_as_often_as_the_others():
    """Ten rows on four ranks, two at once: in the second turn there are rows for one rank only."""

    class Counting(nn.Module):
        passes = 0

        def hidden_states(self, tokens: Tensor) -> None:
            self.passes += 1

    def passes_of(model: Counting, rank: int) -> int:
        runtime = Runtime(rank, 4, torch.device("cpu"), torch.float32, "")
        for _ in own_rows(model, 10, 2, runtime, lambda done: None):
            model.passes += 1
        return model.passes

    class Sharded(Counting):
        set_requires_gradient_sync = None  # by which a sharded model is known

    assert [passes_of(Sharded(), rank) for rank in range(4)] == [2, 2, 2, 2]
    assert [passes_of(Counting(), rank) for rank in range(4)] == [2, 1, 1, 1]


def test_a_device_that_fsdp_does_not_know_is_refused():
    mps = Runtime(0, 1, torch.device("mps"), torch.float32, "")
    with pytest.raises(ValueError, match="--fsdp needs --device cpu or cuda, not mps"):
        sharded.shard(gpt(), mps)


def test_ranks_on_gpus_say_which_one_is_theirs(monkeypatch):
    """To both backends; on CPUs gloo, which takes no device."""
    told = []
    monkeypatch.setattr(dist, "init_process_group", lambda **how: told.append(how))
    gpu, cpu = torch.device("cuda", 3), torch.device("cpu")
    for device in (gpu, cpu):
        sharded.join(Runtime(0, 1, device, torch.float32, ""))
    for how in told:
        assert isinstance(how.pop("store"), dist.HashStore)
        assert (how.pop("rank"), how.pop("world_size")) == (0, 1)
    for name, value in {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(device))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(runtime, "why_not", lambda device: "nothing is")
    precision = torch.get_float32_matmul_precision()
    runtime.start("cuda", "bf16")
    runtime.start("cpu", "fp32")
    torch.set_float32_matmul_precision(precision)
    both = {"backend": "cpu:gloo,cuda:nccl", "device_id": gpu}
    assert told == [both, {"backend": "gloo"}, gpu, both, {"backend": "gloo"}]
