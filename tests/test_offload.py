"""Offload: results are bitwise those without it, and tensors are where the placement says.

Here the CPU is both device and host, and every copy is still made. Marked tests need a GPU.
"""

import re
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
from conftest import ALL_ON, SMALL, build, metrics, read_log, refusal, same, start_ranks
from hypothesis import given
from hypothesis import strategies as st
from small_batches import LLAMA, batch, loss_of, plain_rows, small_model
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import config
import offload
import pseudo
import train
from model import Transformer, TransformerConfig, run_plain, run_recomputed
from offload import Level, Link, Offload, OffloadConfig, Part, Placement, Slot, place
from support.optim import Optimizers
from support.runtime import Runtime
from support.sizes import empty_model

pytestmark = pytest.mark.usefixtures("no_sample_or_report")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FP32, BF16 = torch.float32, torch.bfloat16
RESIDENT, HOSTED, GRADIENTS, STREAMED = Level
MB = 10**6
PLAIN = (RESIDENT,) * 5  # nothing is moved
MIXTURES = {
    "state": (RESIDENT, HOSTED, HOSTED, HOSTED, HOSTED),
    "gradients": (RESIDENT, GRADIENTS, GRADIENTS, GRADIENTS, GRADIENTS),
    "weights": (RESIDENT, STREAMED, STREAMED, STREAMED, STREAMED),
    "mixed": (HOSTED, RESIDENT, STREAMED, GRADIENTS, HOSTED),
    "all that can": (GRADIENTS, STREAMED, STREAMED, STREAMED, STREAMED),
}


def small(shared=False, **more):
    model = small_model(**more)
    if shared:
        model.h[-1] = model.h[0]
    return model


class Run:
    """Training steps of several micro-batches, with clipping, weight decay, a changing rate."""

    def __init__(self, model, levels=PLAIN, kind="adamw", dtype=FP32, device=CPU):
        self.model, self.dtype, self.device = model, dtype, device
        self.losses, self.norms, self.number = [], [], 0
        self.gradients: list[dict] = []  # of each step, before clipping
        pairs = zip(offload.parts_of(model, kind == "muon", dtype), levels, strict=False)
        parts = tuple(part._replace(level=level) for part, level in pairs)
        self.offloaded = Offload(Placement(parts, budget=0), model, device)
        tensors = self.offloaded.parameters(dict(model.named_parameters()))
        self.optimizers = Optimizers(tensors, kind, 0.1, 0.95)

    def backward(self, is_last, recomputed=False, inputs=None):
        inputs = inputs or batch(packed=self.device == CPU, seed=self.number).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype != FP32):
            run_block = self.offloaded.wrap_block(run_recomputed if recomputed else run_plain)
            loss = loss_of(self.model, inputs, run_block) / 63
        with self.offloaded.around_backward(is_last):
            loss.backward()
        self.losses.append(loss.detach())  # not item(), which would wait for the device
        self.number += 1

    def update(self):
        self.norms.append(self.optimizers.clip_gradients(0.5).item())
        self.offloaded.step(self.optimizers, 1e-2 / (1 + self.number))

    def steps(self, count, micro_batches=3, recomputed=False):
        for _ in range(count):
            for number in range(1, micro_batches + 1):
                self.backward(number == micro_batches, recomputed)
            gradients = {n: p.grad for n, p in self.optimizers.named.items() if p.grad is not None}
            self.gradients.append({n: g.to("cpu", copy=True) for n, g in gradients.items()})
            self.update()
        return self


@cache
def plain(count, **more):
    """Return a run without offload, made once."""
    return Run(small(), **more).steps(count)


def assert_same(run, other):
    """Compare losses, gradients, norms, weights and optimizer state bit for bit."""
    assert run.losses == other.losses and run.norms == other.norms
    assert min(run.norms) > 0.5, "clipping was active"
    assert len(run.gradients) == len(other.gradients)
    assert all(map(same, run.gradients, other.gradients))
    assert same(run.offloaded.weights(), other.offloaded.weights())
    saved = run.optimizers.state_dict()["state"]
    assert saved and same(saved, other.optimizers.state_dict()["state"])


# ---- placement


def levels_of(placement):
    return [part.level for part in placement.parts]


def test_the_example_at_the_head_of_offload_py_is_right():
    """Every number in it, for the command below it."""
    flags = offload.__doc__.split("python train.py ")[-1].replace("\\", "")
    settings = build(flags)
    model = empty_model(config.transformer_config(settings, vocab_size=4160))
    parts = offload.parts_of(model, muon=True, dtype=FP32)
    whole, state, weights = (place(parts, b * MB) for b in (1000, 26.7, 19))
    held = [placement.device_bytes() for placement in (whole, state, weights)]
    assert held == [27_099_136, 26_312_704, 18_448_384]
    assert parts[3].numel == 196_608 and parts[3].state_bytes == 4 * parts[3].numel
    assert levels_of(state) == [RESIDENT] * 3 + [HOSTED] + [RESIDENT] * 3
    assert levels_of(weights) == [RESIDENT, GRADIENTS, *[STREAMED] * 3, GRADIENTS, GRADIENTS]
    for placement in (state, weights):
        hosted = sum(level > RESIDENT for level in levels_of(placement))
        assert placement.host_bytes() == (3 * hosted + 2) * 4 * parts[3].numel
        assert placement.slot_bytes() == 4 * parts[3].numel
    assert HOSTED == max(levels_of(place(parts, 19 * MB, most=HOSTED)))
    assert "at least 10MB" in refusal(place, parts, MB)
    assert "at least 19MB" in refusal(place, parts, MB, most=HOSTED), "of several ranks"
    words = "h.2: state on the host; h.3 to h.5: nothing on the host; 26.3 MB of 26.7 MB"
    assert words in offload.in_words(state)


def test_gradients_of_a_shared_block_stay_on_the_device_until_its_last_use():
    shared = Part("h.0", (0, 3), 1000, 8000, small=0, level=STREAMED)
    assert Placement((shared,), 0).device_bytes() == 4000 + 4 * 4000


NUMEL = st.integers(1, 10**7)
BLOCK = st.tuples(NUMEL, st.sampled_from([4, 8]), st.sampled_from([1, 1, 1, 2, 3]))


def any_model(numel, blocks, dtype):
    """Make parts: blocks of several sizes, some shared by layers, and everything outside them."""
    parts = [Part("outside", (), numel, 8 * numel, 99, numel, tied=True, dtype=dtype)]
    for index, (numel, state, uses) in enumerate(blocks):
        layers, small = (index,) * uses, numel // 1000
        parts.append(Part(f"h.{index}", layers, numel, state * numel, small, dtype=dtype))
    return tuple(parts)


BLOCKS = st.lists(BLOCK, min_size=1, max_size=7)
MODEL = st.builds(any_model, NUMEL, BLOCKS, st.sampled_from([FP32, BF16]))


@given(MODEL, st.floats(0, 1.1), st.floats(0, 1.1))
def test_placements_fit_the_budget_and_offload_in_order(parts, share, more):
    """A refusal names the smallest budget that works. A larger budget never offloads more."""
    whole = place(parts, 2**60).device_bytes()
    share, more = sorted((share, more))
    try:
        placement, roomier = (place(parts, int(s * whole)) for s in (share, more))
    except ValueError as error:
        least = int(re.search(r"at least (\d+)MB", str(error))[1])
        assert place(parts, least * MB).device_bytes() <= least * MB
        assert least == 1 or f"at least {least}MB" in refusal(place, parts, (least - 1) * MB)
        return
    assert placement.device_bytes() <= share * whole
    assert share < 1 or not any(levels_of(placement))
    assert all(b <= a for a, b in zip(levels_of(placement), levels_of(roomier), strict=True))
    outside, *kinds = levels_of(placement)
    assert max(kinds) - min(kinds) <= 1, "gradients leave only after all state has left, and so on"
    assert outside == RESIDENT or set(kinds) == {STREAMED}
    assert outside < STREAMED


def test_a_budget_gives_the_placement_and_too_little_host_memory_a_warning(monkeypatch):
    model = empty_model(TransformerConfig(4, 2, 64, 2048, 24, 40))
    here = Runtime(0, 1, torch.device("cpu"), torch.float32, "", 24 * 10**6)

    def placement(budget):
        return offload.placement_for(OffloadConfig(True, budget), model, here, muon=True)

    placed, auto, whole = map(placement, ("12MB", "auto", "1GiB"))
    assert any(levels_of(placed)) and auto == placed, "half of the free memory"
    monkeypatch.setattr(Runtime, "gather", lambda self, value: [None, value, value - 2])
    assert placement("auto").budget == 12 * 10**6 - 1, "half of what the rank with the least has"
    assert not any(levels_of(whole))
    needed = placed.host_bytes()
    assert "WARNING" not in offload.in_words(placed, needed)
    assert "WARNING: the host has only" in offload.in_words(placed, needed - 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "WARNING" in offload.in_words(placed, 2 * needed - 1)


def test_budgets_are_parsed_with_their_units():
    amounts = {"6GiB": 6 * 2**30, "800MB": 800_000_000, "7": 7, "2 TB": 2 * 10**12}
    assert {text: offload.budget_bytes(text) for text in amounts} == amounts
    assert offload.budget_bytes("auto", 3000) == 1500
    for text in ("6G", "much", "-1GB", "0GiB", "auto"):
        assert f"--offload-budget {text}: " in refusal(offload.budget_bytes, text)


# ---- results


MODELS = [
    ({"blocks": 1}, 1, "adamw"),
    ({"blocks": 3}, 2, "muon"),
    ({"blocks": 3, "kind": "bert", "shared": True}, 2, "muon"),
    ({"blocks": 2, **LLAMA}, 2, "muon"),
]


@pytest.mark.parametrize(("model", "micro_batches", "kind"), MODELS)
def test_every_placement_equals_the_plain_run_bitwise(model, micro_batches, kind):
    """Parts are offloaded one after the other. Each placement makes two steps."""
    more = {"micro_batches": micro_batches, "recomputed": "shared" in model}
    without = Run(small(**model), kind=kind).steps(2, **more)
    levels = [RESIDENT] * len(offload.parts_of(without.model, False, FP32))
    order = offload.offload_order(len(levels))
    assert len(order) == 3 * len(levels) - 1
    for index, level in order:
        levels[index] = level
        run = Run(small(**model), tuple(levels), kind).steps(2, **more)
        assert_same(run, without)
    weights = without.model.state_dict()
    assert same(run.offloaded.weights(), weights) and [*weights] == [*run.offloaded.weights()]


def test_evaluation_fetches_weights_and_a_block_without_its_weights_returns_nan():
    run, without = Run(small(), MIXTURES["weights"]).steps(1), plain(1)
    with torch.no_grad():
        assert torch.equal(loss_of(run.model, batch(seed=9)), loss_of(without.model, batch(seed=9)))
        assert loss_of(run.model, batch(seed=9), run_plain).isnan()
    run.offloaded.fetch(1)  # fetched before the step, so it must not be used after it
    run.steps(1)
    assert_same(run, plain(2))


# ---- memory


def tensors_in(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def is_on_host(offloaded, tensor):
    """Return whether a tensor is in the link's host memory. Its device is always the CPU here."""
    return address(tensor) in map(address, offloaded.link.pieces)


# ---- streams: two accesses that no wait puts in order are a race


class Race(AssertionError):
    """Two accesses to the same memory, at least one of them a write, in no fixed order."""


class Stream:
    """A stream of a GPU, or the host, with a vector clock: the work of others that it follows."""

    def __init__(self, name, host=None):
        self.name, self.host, self.after = name, host or self, Counter()
        self.waits = self.reads = 0  # of a host, for events and numbers

    def wait_stream(self, other):
        self.after |= other.after  # the maximum of each

    def wait_event(self, event):
        self.after |= event.after

    def record_event(self):
        return Event(self.after.copy(), self.host)


class Event(NamedTuple):
    after: Counter
    host: Stream

    def synchronize(self):
        self.host.after |= self.after
        self.host.waits += 1


class Access(NamedTuple):
    begin: int  # address
    end: int
    stream: Stream
    time: int  # on the stream's clock
    writes: bool


class Gpu(TorchDispatchMode):
    """Run on the CPU as if copies were on a GPU's streams, and find races between them.

    An operation that touches the link's memory belongs to the host, or is a copy if a stream of the
    link is current. Everything else runs on the device. As with torch's allocator, freed device
    memory goes back to the stream that asked for it, which may write to it. An operation on a
    stream follows everything that the host did before launching it. The host follows a stream if it
    waits for an event or reads a number.
    """

    def __init__(self, monkeypatch, run):
        super().__init__()
        self.host = Stream("host")
        self.up, self.down = Stream("up", self.host), Stream("down", self.host)
        self.compute = self.current = Stream("compute", self.host)
        self.accesses = defaultdict(list)  # by storage
        self.race = None
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        self.offloaded = run.offloaded  # from here on its copies use streams
        run.offloaded.link.up, run.offloaded.link.down = self.up, self.down

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream or self.current
        yield
        self.current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            return out  # a view
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host.after |= self.compute.after
            self.host.reads += 1
        parameters = func._schema.arguments
        values = dict(zip([p.name for p in parameters], args, strict=False)) | (kwargs or {})
        touched = [
            (tensor, bool(parameter.alias_info and parameter.alias_info.is_write))
            for parameter in parameters
            for tensor in tensors_in(values.get(parameter.name))
            if "empty" not in func.name()  # which reads only a shape
        ]
        is_copy = self.current in (self.up, self.down)
        by_host = not is_copy and any(is_on_host(self.offloaded, tensor) for tensor, _ in touched)
        touched += [(tensor, address(tensor) not in self.accesses) for tensor in tensors_in(out)]
        for tensor, is_written in touched:
            if not by_host or is_on_host(self.offloaded, tensor):
                self.touch(tensor, self.host if by_host else self.current, is_written)
        return out

    def touch(self, tensor, stream, writes):
        key, begin = address(tensor), tensor.data_ptr()
        if key not in self.accesses and not is_on_host(self.offloaded, tensor):
            storage = tensor.untyped_storage()
            weakref.finalize(storage, self.free, key, key + storage.nbytes(), self.current)
        self.access(key, begin, begin + tensor.nbytes, stream, writes)

    def free(self, key, end, owner):
        self.access(key, key, end, owner, True)
        self.accesses.pop(key, None)

    def access(self, key, begin, end, stream, writes):
        stream.after |= self.host.after
        stream.after[stream.name] += 1
        later = []
        for other in self.accesses[key]:
            if other.begin < end and begin < other.end and (writes or other.writes):
                if stream.after[other.stream.name] < other.time:  # reported at the end
                    self.race = Race(f"{stream.name} and {other.stream.name}: {end - begin} bytes")
                if begin <= other.begin and other.end <= end and writes:
                    continue  # what follows this access follows the other one too
            later.append(other)
        self.accesses[key] = [*later, Access(begin, end, stream, stream.after[stream.name], writes)]

    def __exit__(self, *error):
        super().__exit__(*error)
        if self.race and not error[0]:
            raise self.race


def on_streams(monkeypatch, mixture, dtype=FP32):
    """Make two steps on the simulated GPU."""
    run = Run(small(), MIXTURES[mixture], dtype=dtype)
    with Gpu(monkeypatch, run):
        run.offloaded.send(run.offloaded.matrices)
        run.steps(2)
    return run


ON_STREAMS = [("mixed", FP32), ("all that can", FP32), ("weights", BF16)]


@pytest.mark.parametrize(("mixture", "dtype"), ON_STREAMS)
def test_streams_do_not_race_and_results_equal_the_plain_run(mixture, dtype, monkeypatch):
    """In bf16, the weights on the device equal autocast's copies of fp32 weights, and sums over
    micro-batches are fp32 in both runs.
    """
    assert_same(on_streams(monkeypatch, mixture, dtype), plain(2, dtype=dtype))


RECEIVE = Slot.receive


def without_keeping_the_gradient(slot, matrix, gradient, link):
    RECEIVE(slot, matrix, gradient, link)
    slot.arrivals[matrix] = slot.arrivals[matrix]._replace(gradient=None)


nothing = Mock()
MISSING = [
    (Link, "wait", nothing),
    (Stream, "wait_stream", nothing),  # the wait of copies for computations
    (Event, "synchronize", nothing),
    (Slot, "receive", without_keeping_the_gradient),
]


@pytest.mark.parametrize(("owner", "name", "broken"), MISSING)
def test_every_missing_wait_is_reported_as_a_race(owner, name, broken, monkeypatch):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Race):
        on_streams(monkeypatch, "mixed")


def test_the_host_waits_only_for_gradients_copied_two_blocks_ago(monkeypatch):
    run = Run(small(), MIXTURES["gradients"])
    with Gpu(monkeypatch, run) as gpu:
        for number in range(1, 4):
            run.backward(is_last=False)
            assert (gpu.host.waits, gpu.host.reads) == (4 * number - 2, 0)
        run.backward(is_last=True)
        assert (gpu.host.waits, gpu.host.reads) == (4 * 4, 0)


def test_weights_are_copied_while_the_previous_block_computes(monkeypatch):
    """Where the backward or the next forward pass begins, weights stay and are not copied again."""
    run, log, copy = Run(small(), MIXTURES["weights"]).steps(1), [], Link.copy
    layers = {m[0].weight.data_ptr(): layer for layer, m in run.offloaded.streamed.items()}

    def noted(link, stream, pairs):
        pairs = list(pairs)
        log.extend(f"copy {layers[p[1].data_ptr()]}" for p in pairs if p[1].data_ptr() in layers)
        return copy(link, stream, pairs)

    monkeypatch.setattr(Link, "copy", noted)
    for layer, block in enumerate(run.model.h):
        block.register_forward_pre_hook(lambda *_, layer=layer: log.append(layer))
    run.steps(1, micro_batches=2)
    forward = ["copy 1", 0, "copy 2", 1, "copy 3", 2, 3]
    backward = ["copy 2", 3, "copy 1", 2, "copy 0", 1, 0]
    assert log == 2 * [*forward, *backward] + ["copy 0"], "copy 0 is for the next step"


def test_memory_is_page_locked_in_pieces_that_split_no_tensor(monkeypatch, capsys):
    """With a limit of 1,024 bytes the pieces are 640 + 320, 256, 2,048 (one tensor), and 128.

    If the driver refuses a piece, one line says so and training continues. CUDA reports the refusal
    again to the next call, which must not be a kernel.
    """
    sizes, link, locked = [600, 300, 200, 2000, 64, 0, 63], Link(CPU), {}

    def register(address, size, flags):
        if sum(locked.values()) + size > 1300:
            return 2
        locked[address] = size
        return 0

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop)
    driver.cudaGetErrorString = {2: "out of memory"}.get
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError))
    monkeypatch.setattr(Link, "PIECE", 1024)
    link.up = Stream("up")
    memory = link.memory(sizes)
    torch.zeros.assert_called_once_with(1, device=CPU)
    pieces = {piece.data_ptr(): piece.nbytes for piece in link.pieces}
    assert list(pieces.values()) == [960, 256, 2048, 128]
    assert [len(tensor) for tensor in memory] == sizes, "none is split"
    assert locked == dict([*pieces.items()][:2])
    assert capsys.readouterr().err.count("\n") == 1
    del link
    assert locked == {}, "unlocked when the link is freed"


def most_bytes(run, micro_batches, V, T):
    """Return the peak of device memory in a step: what is resident, plus what torch allocates.

    The second step is measured, when everything that stays has been allocated. AdamW's state of
    offloaded tensors counts as host memory, though it is not in the link's memory.
    """

    def step():
        for number in range(1, micro_batches + 1):
            inputs = plain_rows(torch.randint(V, (1, T)))
            run.backward(number == micro_batches, inputs=inputs)
        run.update()

    step()
    offloaded, named = run.offloaded, run.optimizers.named
    on_device = {name for name, tensor in named.items() if not is_on_host(offloaded, tensor)}
    state = [t for n in on_device for t in run.optimizers.state[n].values()]
    fetched = [weight for weights, _ in offloaded.fetched.values() for weight in weights]
    tensors = [*run.model.parameters(), *state, *fetched]
    storages = {address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    with profile(profile_memory=True) as profiled:
        step()
    changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return sum(storages.values()) + max(accumulate(event.nbytes() for event in changes))


OFFLOADED = [(HOSTED, RESIDENT, True), (GRADIENTS, RESIDENT, True)]
OFFLOADED += [(STREAMED, outside, tied) for outside in (RESIDENT, GRADIENTS) for tied in (0, 1)]


@pytest.mark.parametrize(("blocks", "outside", "tied"), OFFLOADED)
def test_a_step_needs_the_planned_memory(blocks, outside, tied):
    """Within 10 %. The vocabulary is so large that its gradients dominate temporary memory.

    With one micro-batch nothing is accumulated, so a step needs less.
    """
    V, T = 4096, 8
    torch.manual_seed(0)
    config = TransformerConfig(4, 2, 64, 256, T, V, tied=tied)
    run = Run(Transformer(config), (outside, *[blocks] * 4))
    planned, most = run.offloaded.placement.device_bytes(), most_bytes(run, 3, V, T)
    assert most == pytest.approx(planned, rel=0.1)
    assert most_bytes(run, 1, V, T) < 1.01 * planned
    without = planned - 4 * V * 64
    assert most > 1.05 * without, "control: the embedding's gradients are left out"


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("mixture", MIXTURES)
def test_on_a_gpu_losses_equal_plain_training_within_the_planned_memory(mixture):
    """So do the first gradients, before the CPU's AdamW, which rounds differently, has run.

    All memory that copies use is page-locked, and not more than was asked for.
    """
    # cuBLAS allocates a workspace of some MiB for each thread at its first product
    warm = torch.ones(64, 64, device=GPU, requires_grad=True)
    (warm @ warm).sum().backward()

    def trained(offloaded):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(4, 4, 256, 1024, 24, 512))
        run = Run(model, offloaded, device=GPU).steps(4, micro_batches=2)
        placement, pieces = run.offloaded.placement, run.offloaded.link.pieces
        assert torch.cuda.memory_allocated() - before <= placement.device_bytes() + 2**20
        assert all(piece.is_pinned() for piece in pieces if piece.nbytes)
        assert sum(piece.nbytes for piece in pieces) <= placement.host_bytes() + 64 * 100
        return [loss.item() for loss in run.losses], run.gradients[0]

    (losses, gradients), (expected, others) = trained(MIXTURES[mixture]), trained(PLAIN)
    assert losses[:2] == pytest.approx(expected[:2], rel=1e-6)
    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(gradients, others, rtol=0, atol=1e-6)


# ---- runs

SHORT = "--tokens 1024"
TIGHT = "--offload --offload-budget 430KB"  # of 960 KiB, so that some weights are offloaded too


def test_off_is_absent_and_neutral_is_identity(run, log_of, monkeypatch):
    plainly = metrics(log_of(SHORT))
    assert metrics(run(f"{SHORT} --offload --offload-budget 1GB", out="roomy")) == plainly
    for name in ("preview", "placement_for", "Offload"):
        monkeypatch.setattr(offload, name, None)  # a call would fail
    assert metrics(run(SHORT, out="poisoned")) == plainly


@pytest.mark.dist
def test_two_ranks_with_offloaded_state_train_as_without(store_dir, tmp_path):
    """Their weights agree too, which a run checks when it saves."""
    flags = f"{SMALL} --tokens 512 --micro-batch-size 2 --eval-every 0 --data {store_dir}"
    offloaded = f"{flags} --out {tmp_path}/with --offload --offload-budget 820KB"
    start_ranks(2, f"{flags} --out {tmp_path}/without".split(), offloaded.split())
    assert metrics(read_log(tmp_path / "with")) == metrics(read_log(tmp_path / "without"))


def test_each_stage_of_pseudo_is_placed_or_refused_at_the_start(run, log_of, tmp_path, capsys):
    """The middle stage needs more memory than the first one and than the real model."""
    plainly = f"{SHORT} --layers 8 --pseudo --pseudo-group 1 --pseudo-until 0.3,0.6 --seq-len 16"
    plainly += " --optimizer adamw"
    flags, least = f"{plainly} --offload --offload-budget", 473_088
    settings = build(f"{SMALL} {flags} 1GB")
    shape = config.transformer_config(settings, vocab_size=320)
    for owners in pseudo.owners_to_come(settings.pseudo, 8, 0.0)[::2]:
        parts = offload.parts_of(pseudo.share_weights(empty_model(shape), owners), False, FP32)
        place(parts, least - 1)  # raises if it does not fit
    for more in ("--dry-run", ""):
        message = refusal(run, f"{flags} {least - 1} {more}")
        assert re.search(r"--offload-budget \S+ KB is too small", message)
    assert not (tmp_path / "run").exists()
    expected, _ = metrics(log_of(plainly)), capsys.readouterr()
    lines = run(f"{flags} {least}")
    assert "gradients and weights on the host" in capsys.readouterr().out
    assert metrics(lines) == expected
    assert [line["event"] for line in lines].count("stage") == 2
    assert len(pseudo.owners_to_come(settings.pseudo, 8, 0.6)) == 1, "past stages do not count"


def test_checkpoints_do_not_depend_on_offload(run, tmp_path):
    """A run resumes with offload what it began without, and the reverse, with all techniques on."""
    flags = f"{ALL_ON} --micro-batch-size 2 --keep 9 {SHORT} --checkpoint-every 512"
    whole = metrics(run(flags, out="whole"))
    assert metrics(run(f"{flags} --checkpoint-activations {TIGHT}", out="offloaded")) == whole
    for out, other in (("whole", TIGHT), ("offloaded", "--no-offload")):
        for file in sorted((tmp_path / out).glob("step-*.pt"))[1:]:
            file.unlink()
        assert train.main(["--resume", "--out", out, *other.split()]) == 0
        lines = read_log(tmp_path / out)
        assert metrics(lines) == whole
        assert [line["resumed_at"] for line in lines if line["event"] == "run"][1] > 0
