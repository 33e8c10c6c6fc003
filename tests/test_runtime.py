"""Devices, how commands end, and models sharded over ranks compared with one process: losses,
steps, checkpoints.

Starting ranks takes seconds, so they are started once and do all checks. If an assertion fails in a
rank, the test ends with its traceback.

    python -m pytest tests/test_runtime.py
"""

import errno
import importlib
import json
import math
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ALL_ON, SMALL, contents, losses_of, read_log, refusal, same, start_ranks, widen
from small_batches import LLAMA, batch, for_model, loss_of
from torch import Tensor
from torch._subclasses import FakeTensorMode

import pseudo
import sample
import train
from bert import Bert, BertConfig
from data import Data, GptTask
from evaluate import Evaluation
from kernels import triton_here
from kernels.packed_attention import chosen_impl
from kernels.token_drop import checked_impl
from ltd import drop_tokens
from model import Batch, Transformer, TransformerConfig, run_plain, run_recomputed
from support import checkpoint, fsdp, process
from support import runtime as runtimes
from support.optim import Optimizers
from support.process import ROOT
from support.runtime import Runtime, start
from support.store import Store
from support.tokenizer import byte_lengths, get_encoding

# --- devices


def test_start_names_the_device_and_dtype_and_autocasts_only_in_bf16():
    chosen = start("cpu", "auto")
    assert chosen.dtype == torch.float32 and chosen.is_rank0
    assert "cpu (as asked), fp32" in chosen.why
    assert not chosen.autocast()._enabled
    assert start("cpu", "bf16").autocast()._enabled


def test_mps_is_only_taken_if_asked_for_and_called_untried(monkeypatch):
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start("auto", "auto").device.type == "cpu"
    assert "mps (as asked, untried" in start("mps", "auto").why


OF_LINUX = "sched_getaffinity posix_fadvise posix_fallocate memfd_create copy_file_range"


def test_a_run_needs_nothing_that_linux_alone_has(run, monkeypatch):
    for name in OF_LINUX.split():
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(process, "Path", lambda file: Path(f"/nowhere{file}"))  # no /proc
    monkeypatch.setattr(process.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(process.ctypes, "CDLL", Mock(side_effect=AssertionError))
    assert process.host_free() is None
    assert run("--micro-batch-size 2")[-1]["event"] == "finished"


COMMANDS = "train prepare evaluate sample report analyze packing support.weights"


def import_on_windows(command: str) -> None:
    folders = {ROOT, ROOT / "support", ROOT / "kernels"}  # not a virtual environment in ROOT
    files = {name: getattr(m, "__file__", None) or "" for name, m in sys.modules.items()}
    for name in [name for name, file in files.items() if Path(file).parent in folders]:
        del sys.modules[name]
    sys.modules["fcntl"], sys.platform = None, "win32"
    importlib.import_module(command)


@pytest.mark.parametrize("command", COMMANDS.split())
def test_on_windows_a_command_says_to_use_wsl(command, capfd):
    child = get_context("fork").Process(target=import_on_windows, args=(command,))
    child.start()
    child.join()
    said = capfd.readouterr().err
    assert "use WSL" in said and said.count("\n") == 1


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Make torch report a GPU with Triton and gcc; called with the compute capability."""

    def of(major: int, minor: int) -> None:
        answers = {
            "is_available": True,
            "current_device": 0,
            "set_device": None,
            "get_device_capability": (major, minor),
            "get_device_properties": SimpleNamespace(major=major, minor=minor),
            "_check_bf16_tensor_supported": True,  # older GPUs emulate it
            "mem_get_info": (1 << 30, 1 << 30),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        triton_here.cached_why_not.cache_clear()

    (tmp_path / "gcc").touch(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(triton_here, "triton", object())
    monkeypatch.setattr(triton_here, "python_header", lambda: Path(__file__))
    yield of
    triton_here.cached_why_not.cache_clear()


NOWHERE = Path("/nowhere/Python.h")
GPUS = [  # compute capability, what replaces a part of triton_here, what start says
    ((7, 5), {}, "; no Triton kernels: compute capability 7.5 is below 8.0"),
    ((8, 0), {}, "bf16, one process, 1 threads; Triton kernels"),
    ((9, 0), {"triton": None}, "; no Triton kernels: Triton is not installed"),
    ((9, 0), {"python_header": lambda: NOWHERE}, f"headers, and {NOWHERE} was not found"),
    ((9, 0), {"shutil": Mock(which=lambda name: None)}, "and gcc or clang was not found"),
]


@pytest.mark.parametrize(("capability", "replaced", "said"), GPUS)
def test_dtype_and_kernels_follow_from_the_gpu(gpu, monkeypatch, capability, replaced, said):
    for name, value in replaced.items():
        monkeypatch.setattr(triton_here, name, value)
    gpu(*capability)
    assert torch.cuda.is_bf16_supported(), "torch counts emulation as support"
    chosen = start("cuda", "auto")
    assert chosen.dtype == (torch.float32 if capability < (8, 0) else torch.bfloat16)
    assert chosen.why.endswith(said)
    assert start("cuda", "bf16").dtype == torch.bfloat16, "as the flag says"
    with FakeTensorMode():
        x = torch.empty(2, 5, 4, device="cuda")
    kept = torch.zeros(2, 3, dtype=torch.int64)
    impls = (chosen_impl("cuda", torch.bfloat16, 64), checked_impl("auto", x, kept))
    assert impls == (("dense", "torch"), ("triton", "triton"))[said.endswith("; Triton kernels")]


def test_ranks_communicate_by_nccl_on_gpus_and_by_gloo_on_the_host(gpu, monkeypatch):
    gpu(9, 0)
    init, met = Mock(), (dist.HashStore(), 3, 4)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **more: iter([met]))
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    start("cuda", "auto")
    asked = init.call_args.kwargs
    assert (asked["rank"], asked["world_size"], asked["device_id"].index) == (3, 4, 1)
    assert asked["backend"] == "cpu:gloo,cuda:nccl"


def test_ranks_that_never_meet_end_with_one_line_after_a_minute(monkeypatch):
    asked, says = {}, r"^error: rank 1 .* all 2 ranks .*: 1/2 clients joined$"

    def rendezvous(url, **options):
        asked.update(options)
        raise dist.DistStoreError("1/2 clients joined")

    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    for address, seconds in (("127.0.0.1", 60), ("node-7", 300)):
        for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": address}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match=says):
            start("cpu", "fp32")
        assert asked["timeout"].seconds == seconds


# --- how a command ends

ENDS = {  # what main raises or returns, exit status, output
    "a mistake": (ValueError("--flag 3:\n too much"), 2, "error: --flag 3: too much\n"),
    "a file": (FileNotFoundError(2, "No such file", "/x/y"), 2, "error: /x/y: No such file\n"),
    "an interrupt": (KeyboardInterrupt(), 130, ""),
    "a status": (143, 143, ""),
    "nothing": (None, 0, ""),
}


def status_of(does: object) -> int:
    """Return the exit status of a command that raises or returns this."""

    def main():
        if isinstance(does, BaseException):
            raise does
        return does

    with pytest.raises(SystemExit) as end, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", sys.exit)
        process.exit_cleanly(main)
    return end.value.code


@pytest.mark.parametrize(("does", "status", "said"), ENDS.values(), ids=ENDS)
def test_the_exit_status_and_message_follow_from_how_main_ends(does, status, said, capsys):
    assert (status_of(does), capsys.readouterr().err) == (status, said)


def test_misspelled_flags_get_a_suggestion():
    parser = process.Parser()
    parser.add_argument("--curriculum", choices=["124M", "350M"])
    meant = {"--curiculum x": "--curriculum", "--curriculum 124m": "--curriculum 124M"}
    for line, suggested in meant.items():
        assert f"did you mean {suggested}?" in refusal(parser.parse_args, line.split())
    assert "see --help" in refusal(parser.parse_args, ["--loudness"])


def test_other_exceptions_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        process.exit_cleanly(lambda: 1 / 0)


def test_only_rank_0_prints_a_mistake_and_torchrun_can_quote_it(monkeypatch, capsys, tmp_path):
    for rank, said in ((0, "error: --flag 3\n"), (1, "")):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        assert status_of(ValueError("--flag 3")) == 2
        assert capsys.readouterr().err == said
        quoted = json.loads((tmp_path / f"{rank}.json").read_text())["message"]
        assert "--flag 3" in quoted["message"]


def print_to_a_closed_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    sys.stdout = os.fdopen(write, "w")
    process.exit_cleanly(lambda: print("x" * 10**6))


def test_a_closed_pipe_ends_a_command_silently(capfd):
    command = get_context("fork").Process(target=print_to_a_closed_pipe)
    command.start()
    command.join()
    assert command.exitcode == 141 and capfd.readouterr().err == ""


# --- sharded models

ROWS = 6  # of a step: 3 or 2 on each rank, one at a time
CLIP = 0.02
CPU = torch.device("cpu")
T, V = 24, 65  # neither 2 nor 3 ranks can share the 65 rows of the embedding evenly


def gpt(vocab_size: int = V, seq_len: int = T) -> Transformer:
    return widen(TransformerConfig(4, 2, 16, 64, seq_len, vocab_size, "rope").build())


def gpt_with_shared_block() -> Transformer:
    """Return a model in which layers 1 to 3 share weights and the last layer is absent."""
    model = widen(TransformerConfig(5, 2, 16, 64, T, V, "learned").build())
    return pseudo.share_weights(model, (0, 1, 1, 1, pseudo.ABSENT))


def llama() -> Transformer:
    return widen(TransformerConfig(3, 2, 16, 64, T, V, **LLAMA).build())


def bert() -> Transformer:
    return widen(BertConfig(3, 2, 16, 64, T, V, "learned", nsp=True).build())


def rows_of(model: Transformer, step: int, rows: int) -> Batch:
    """Return packed rows; for a BERT with pairs, with the answers whether second parts follow."""
    packed = batch(seed=step, B=rows, T=T)
    if isinstance(model, Bert):
        begins = (packed.positions == 0) & (packed.doc_ids >= 0)
        random = torch.Generator().manual_seed(step)
        packed.targets[begins] = torch.randint(2, (int(begins.sum()),), generator=random)
    return for_model(model, packed)


class Trained:
    """A model and its optimizers, trained on this rank's rows of a step, or on all of them."""

    def __init__(self, model: Transformer, runtime: Runtime = checkpoint.ALONE):
        self.model, self.runtime = model, runtime
        if runtime.world_size > 1:
            fsdp.shard(model, runtime)
        named = dict(model.named_parameters())
        self.optimizers = Optimizers(named, "muon", weight_decay=0.1, beta2=0.95)

    def gradients(self, step: int, autocast=nullcontext) -> Tensor:
        """Compute gradients row by row; layers 1 and 2 keep half of the tokens. Return the loss."""
        rank, world_size = self.runtime.rank, self.runtime.world_size
        inputs = rows_of(self.model, step, ROWS)
        own = range(ROWS * rank // world_size, ROWS * (rank + 1) // world_size)
        kept = torch.arange(step % 2, T, 2)[None]
        run_block = drop_tokens({1: kept, 2: kept}, run_recomputed if step % 2 else run_plain)
        total = torch.zeros(())
        for row in own:
            if world_size > 1:
                fsdp.sync_gradients(self.model, row == own[-1])
            with autocast():
                loss = loss_of(self.model, inputs.rows(slice(row, row + 1)), run_block)
            (loss * world_size / (ROWS * T)).backward()
            total += loss.detach() / (ROWS * T)
        return self.runtime.reduce(total)

    def step(self, step: int) -> tuple[float, float]:
        """Make a step; return the loss, and the gradient's norm before clipping."""
        loss = self.gradients(step).item()
        norm = self.optimizers.clip_gradients(CLIP).item()
        assert norm > CLIP, "nothing is clipped"
        self.optimizers.step(1e-2)
        return loss, norm

    def all_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.optimizers.named.items()}

    def state(self) -> dict:
        more = {"step": 1, "best": math.inf, "best_step": 0, "config": {"argv": ["--fsdp"]}}
        weights, optimizers = self.model.state_dict(), self.optimizers.state_dict()
        state = {"model": weights, "optimizers": optimizers, **more}
        return {name: kind() for name, kind in checkpoint.ENTRIES.items()} | state


def close(numbers, expected) -> bool:
    return numbers == pytest.approx(expected, abs=1e-6, rel=0)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((whole(ours[name]) - whole(theirs[name])).abs().max().item() for name in ours)


def check_steps(runtime: Runtime, build: Callable) -> None:
    """Steps with accumulation, clipping, packed rows, token dropping and, half of the time,
    recomputed activations equal those of one process; so do states, losses and logits.

    In float64, because ranks sum gradients in another order, and Muon enlarges the smallest
    singular values of a gradient, rounding errors included.
    """
    ours, alone = (Trained(build().double(), where) for where in (runtime, checkpoint.ALONE))
    held = sum(fsdp.local_rows(p).numel() for p in ours.model.parameters())
    total = sum(p.numel() for p in alone.model.parameters())
    assert held / total - 1 / runtime.world_size < 0.04
    for step in range(2):
        assert close(ours.step(step), alone.step(step)), (build, step)
    assert distance(ours.model.state_dict(), alone.model.state_dict()) < 1e-6
    inputs, values = rows_of(ours.model, 9, 3), []
    with torch.no_grad():
        for model in (ours.model, alone.model):
            with fsdp.evaluating(model):
                x = model(*inputs.inputs)
                values.append([x, model.losses(x, inputs), model.logits(x)])
                if isinstance(model, Bert):
                    values[-1].append(model.follows(x.flatten(0, 1), inputs.answers))
    for value, expected in zip(*values, strict=True):
        assert (value - expected).abs().max() < 1e-6
    for trained in (ours, alone):  # an evaluation must not leave weights gathered or freed
        trained.gradients(2)
    assert distance(ours.all_gradients(), alone.all_gradients()) < 1e-6


def check_nonfinite_gradients(runtime: Runtime) -> None:
    """A gradient that is not finite on one rank is noticed on every rank."""
    ours = Trained(gpt(), runtime)
    ours.gradients(0)
    rows = fsdp.local_rows(ours.model.h[1].mlp.c_fc.weight.grad)
    if runtime.rank == 1:
        rows[0, 0] = math.nan
    assert ours.optimizers.clip_gradients(1.0).isnan()
    assert runtime.gather(bool(rows.isnan().any())) == [True] * runtime.world_size
    ours.optimizers.step(1e-2)  # frees the gradients
    fsdp.sync_gradients(ours.model, False)  # control: without averaging there are none
    loss_of(ours.model, rows_of(ours.model, 0, 1)).backward()
    assert all(gradient is None for gradient in ours.all_gradients().values())


def check_drift(runtime: Runtime) -> None:
    """If ranks have drifted apart, which torch does not notice, every rank reports it."""
    named = dict(gpt().named_parameters())
    runtimes.check_agreement(runtime, named)
    with torch.no_grad():
        named["h.1.mlp.c_fc.weight"][0, 0] += runtime.rank
    message = refusal(runtimes.check_agreement, runtime, named)
    assert message.startswith("ranks differ in the bits of h.1.mlp.c_fc.weight: rank 0")


def check_bf16(runtime: Runtime) -> None:
    """Gathering in bf16 adds little error, if norms run in fp32 as under autocast on a GPU."""
    bf16 = Runtime(runtime.rank, runtime.world_size, CPU, torch.bfloat16, "")
    on_gpu = fsdp.precision(SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16))
    layer_norm = F.layer_norm

    def norm_in_fp32(x, shape, weight, bias, eps):
        return layer_norm(x.float(), shape, weight.float(), bias.float(), eps)

    def gradients(ranks: Runtime, autocast: Callable = bf16.autocast) -> Tensor:
        trained = Trained(gpt(), ranks)
        trained.gradients(0, autocast)
        return torch.cat([whole(g).flatten() for g in trained.all_gradients().values()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "layer_norm", norm_in_fp32)
        truth, rounded = gradients(checkpoint.ALONE, nullcontext), gradients(checkpoint.ALONE)
        assert (gradients(bf16) - rounded).abs().max() < 1e-6
        patch.setattr(fsdp, "precision", lambda runtime: on_gpu)
        gathered_in_bf16 = gradients(bf16)
    error = (rounded - truth).norm() / truth.norm()
    assert error > 1e-4, "autocast rounds"
    assert (gathered_in_bf16 - truth).norm() / truth.norm() < 1.2 * error


def check_text_and_evaluation(runtime: Runtime, store: str) -> None:
    """All ranks generate rank 0's text though their random numbers differ. Evaluation is right
    though in its last turn only some ranks have rows.
    """
    encoding = get_encoding("bytes")
    ours, alone = Trained(gpt(320, 32), runtime).model, gpt(320, 32)
    texts = []
    for model, number in ((ours, runtime.rank), (alone, 0)):
        random = torch.Generator().manual_seed(number)
        texts.append("".join(sample.continue_text(model, encoding, "a", 6, generator=random)))
    assert texts[0] == texts[1]
    data = Data(encoding, Store.open(store), byte_lengths(encoding))
    evaluation = Evaluation(data, GptTask(), 32, tokens=300)
    rows = len(evaluation.parts[0].rows)
    at_once = next(n for n in (4, 5, 7) if -(-rows // n) % runtime.world_size)
    result = evaluation.run(ours, runtime, at_once)
    expected = evaluation.run(alone, checkpoint.ALONE, at_once)
    assert close(result.val_bpb, expected.val_bpb) and result.targets == expected.targets
    assert hasattr(ours.wte.weight, "to_local"), "still gathered after the evaluation"


# ---- checkpoints


def check_failing_saves(runtime: Runtime, folder: Path) -> None:
    """A save or load that fails on one rank fails on all, and the older checkpoint stays."""
    ours = Trained(gpt(), runtime)
    path, later = checkpoint.step_path(folder, 1), checkpoint.step_path(folder, 2)
    checkpoint.save(path, ours.state(), runtime)
    before = contents(folder) if runtime.is_rank0 else None
    full_disk = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        message = refusal(checkpoint.save, later, ours.state(), runtime, keep=1)
    assert "00000002.pt: not written" in message and "No space left" in message
    if runtime.rank == 1:
        fsdp.local_rows(ours.model.wte.weight.detach())[0] = math.nan
    message = refusal(checkpoint.save, later, ours.state(), runtime, keep=1)
    assert message == "weight wte.weight is not finite"
    if runtime.is_rank0:
        assert contents(folder) == before
        path.write_bytes(before[path.name][:-1])
    assert f"{path} is damaged" in refusal(checkpoint.load, path, runtime, sharded=True)


def check_resuming(runtime: Runtime, folder: Path) -> None:
    """Two ranks make a step and save one file, which is bitwise what they hold. From it two ranks,
    three ranks and one process get the same bits, and make two more steps with the same losses.
    """
    alone = Trained(gpt_with_shared_block())
    losses = [alone.step(step)[0] for step in range(3)][1:]
    path = checkpoint.step_path(folder, 1)
    if runtime.world_size == 2:
        ours = Trained(gpt_with_shared_block(), runtime)
        ours.step(0)
        checkpoint.save(path, ours.state(), runtime)
        assert same(checkpoint.map_tensors(ours.state(), whole), checkpoint.load(path))
        assert os.listdir(folder) == [path.name]
    saved = checkpoint.load(path)
    assert saved["best"] == math.inf and saved["config"]["argv"] == ["--fsdp"]
    # only rank 0 sees the file
    source = path if runtime.is_rank0 else folder / "missing" / path.name
    assert same(checkpoint.load(source, runtime), saved)
    state = checkpoint.load(source, runtime, sharded=True)
    assert same(checkpoint.map_tensors(state, whole), saved)
    ours = Trained(gpt_with_shared_block(), runtime)
    moments = state["optimizers"]["state"]["wte.weight"].values()
    for tensor in (t for t in (*state["model"].values(), *moments) if t.ndim):
        most = -(-len(tensor) // runtime.world_size) * tensor[0].nbytes
        held = fsdp.local_rows(tensor).untyped_storage().nbytes()
        assert held <= most, "it holds more than its rows"
    for trained, loaded in ((ours, state), (Trained(gpt_with_shared_block()), saved)):
        trained.model.load_state_dict(loaded["model"])
        trained.optimizers.load_state_dict(loaded["optimizers"])
        assert close([trained.step(step)[0] for step in (1, 2)], losses)


def check_errors(runtime: Runtime) -> None:
    """An error that is no user's mistake ends every rank, and keeps its kind where it happened."""
    for failing, act in ((0, runtime.on_rank0), (1, runtime.on_all_ranks)):
        fails = runtime.rank == failing
        kind = KeyError if fails else ValueError
        says = "loss" if fails else f"rank {failing} failed: KeyError: 'loss'"
        with pytest.raises(kind, match=says):
            act(lambda fails=fails: {}["loss"] if fails else None)


def check_freed_memory_is_kept() -> None:
    """Count page faults of two steps before and after telling glibc to keep freed memory."""

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        [torch.ones(4_000_000) for _ in range(4)]  # 64 MB, freed together
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    before = [faults() for _ in range(3)]
    process.keep_freed_memory()
    after = [faults() for _ in range(3)]
    assert min(before) > 3_500 and max(after[1:]) < min(before) / 2


def check_all(arguments: list[str]) -> None:
    folder, store = Path(arguments[0]), arguments[1]
    if platform.libc_ver()[0] == "glibc" and os.environ["RANK"] == "1":
        check_freed_memory_is_kept()
    torch.set_num_threads(1)
    runtime = runtimes.start("cpu", "fp32")
    check_resuming(runtime, folder)
    check_text_and_evaluation(runtime, store)
    if runtime.world_size == 2:
        for build in (gpt_with_shared_block, bert, llama):
            check_steps(runtime, build)
        check_nonfinite_gradients(runtime)
        check_drift(runtime)
        check_errors(runtime)
        check_bf16(runtime)
        check_failing_saves(runtime, folder.with_name("failing"))
    dist.destroy_process_group()


@pytest.mark.dist
def test_ranks_together_compute_what_one_process_computes(tmp_path, store_dir):
    """Three ranks continue from checkpoints that two ranks have written."""
    (tmp_path / "run").mkdir()
    for ranks in (2, 3):
        start_ranks(ranks, [str(tmp_path / "run"), str(store_dir)], work=check_all)


def test_fsdp_refuses_other_devices_than_cpu_and_cuda():
    mps = Runtime(0, 1, torch.device("mps"), torch.float32, "")
    assert "--fsdp" in refusal(fsdp.shard, gpt(), mps)


# --- sharded runs

# 12 rows a step, which 1, 2 and 3 ranks share evenly; at this learning rate rounding is not
# amplified.
FLAGS = f"{SMALL} --batch-tokens 384 --lr 1e-3 --tokens 3840 --checkpoint-every 1152 --keep 9"
SHARED = "--pseudo --pseudo-group 2 --pseudo-until 0.5 --optimizer adamw"
GROWING = "--pseudo --pseudo-layers 2 --pseudo-until 0.5"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("technique", [GROWING, SHARED])
def test_a_run_resumes_on_other_ranks_sharded_or_not(technique, store_dir, tmp_path, monkeypatch):
    """From a checkpoint of two ranks before the switch: unsharded in one process, and on three;
    and from a checkpoint of one process: sharded on two.
    """
    monkeypatch.chdir(tmp_path)
    line = f"{FLAGS} {technique} {ALL_ON} --data {store_dir} --out".split()
    assert train.main([*line, "whole"]) == 0
    start_ranks(2, [*line, "alone", "--fsdp"])
    expected = pytest.approx(losses_of("whole"), abs=1e-5)
    assert losses_of("alone") == expected
    scores = [read_log(Path(out), "eval")[-1]["val_bpb"] for out in ("whole", "alone")]
    assert scores[1] == pytest.approx(scores[0], abs=1e-5)
    for out in ("whole", "alone"):
        _, *later = checkpoint.steps_in(Path(out))
        assert len(later) >= 2
        for path in later:
            path.unlink()
    shutil.copytree("alone", "three")
    assert train.main(["--resume", "--out", "alone", "--no-fsdp"]) == 0
    start_ranks(3, ["--resume", "--out", "three"])
    start_ranks(2, ["--resume", "--out", "whole", "--fsdp"])
    for out in ("alone", "three", "whole"):
        assert losses_of(out) == expected and len(read_log(Path(out), "run")) == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_process_can_train_sharded_and_resume_without(store_dir, tmp_path, device, capsys):
    flags = f"{FLAGS} --tokens 1536 --device {device} --dtype fp32 --data {store_dir}".split()
    assert train.main([*flags, "--out", str(tmp_path / "plain")]) == 0
    # on a GPU Muon orthogonalises in bf16, which amplifies differences in rounding
    expected = pytest.approx(losses_of(tmp_path / "plain"), abs=1e-5 if device == "cpu" else 1e-3)
    out = tmp_path / "sharded"
    assert train.main([*flags, "--fsdp", "--out", str(out)]) == 0
    assert "a checkpoint takes" in capsys.readouterr().out
    assert losses_of(out) == expected
    _, last = checkpoint.steps_in(out)
    last.unlink()
    assert train.main(["--resume", "--out", str(out), "--no-fsdp"]) == 0
    assert losses_of(out) == expected and len(read_log(out, "run")) == 2
