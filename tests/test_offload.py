"""Offload: bitwise what it is without, everything where the plan says, in every mixture.

Device and host are both the CPU here; every copy is made all the same. What can only be seen on a
GPU is marked so.
"""

import io
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from conftest import ALL_ON, metrics, read_log
from small_batches import batch
from torch._dynamo.testing import CompileCounter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ltd
import offload
import pseudo
import train
from kernels import packed_attention
from model import Transformer, TransformerConfig, run_plain, run_recomputed
from offload import Offloaded
from support.rows.batch import Batch
from support.step.link import Landing, Link
from support.step.optim import LossScale, Optimizers
from support.step.placement import WHERE, Away, Placement, Work, moves, part_of, parts_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DEVICES = [CPU, pytest.param(GPU, marks=pytest.mark.gpu)]
NOTHING, STATE, GRADIENTS, WEIGHTS = Away
MIXTURES = {
    "nothing": [NOTHING] * 5,
    "state": [NOTHING, STATE, STATE, STATE, STATE],
    "gradients": [NOTHING, GRADIENTS, GRADIENTS, GRADIENTS, GRADIENTS],
    "weights": [NOTHING, WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS],
    "mixed": [STATE, NOTHING, WEIGHTS, GRADIENTS, STATE],
    "all that can": [GRADIENTS, WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS],
}


def small(shared=False, kind="gpt", pos="learned", blocks=4):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(kind, blocks, 2, 16, 32, 24, 40, pos))
    if shared:
        model.h[3] = model.h[0]
    return model


def placed(model, away, kind="adamw", dtype="fp32"):
    parts = parts_of(model, kind == "muon")
    return Placement(parts, tuple(away)[: len(parts)], dtype, budget=0)


class Run:
    """Steps of two micro-batches, with clipping, weight decay and a rate that changes."""

    def __init__(self, model, away=None, kind="adamw", dtype="fp32", early=True, device=CPU):
        self.model, self.found, self.norms, self.number = model, [], [], 0
        self.gradients: list[dict] = []  # of each step, before they are clipped
        self.dtype, self.device = dtype, device
        self.held = None
        tensors = dict(model.named_parameters())
        if away is not None:
            self.held = Offloaded(model, placed(model, away, kind, dtype), device, early)
            tensors = self.held.parameters()
        self.optimizers = Optimizers(tensors, kind, 0.1, (0.9, 0.95), dtype == "fp16")

    @property
    def losses(self):
        return [loss.item() for loss in self.found]

    def run_block(self, number, dropping=False, recomputed=False):
        run_block = run_recomputed if recomputed else run_plain
        if self.held:
            run_block = self.held.run_block(run_block, recomputed)
        if not dropping:
            return run_block
        bits = torch.randint(2**40, (2, 3, 24), generator=torch.Generator().manual_seed(number))
        kept = ltd.draw(15, bits)
        return ltd.token_dropping(dict(zip((1, 2), kept, strict=True)), run_block)

    def backward(self, last, **how):
        dtype = torch.float16 if self.dtype == "fp16" else torch.bfloat16
        mixed = torch.autocast(self.device.type, dtype, enabled=self.dtype != "fp32")
        run_block = self.run_block(self.number, **how)
        inputs = batch(packed=self.device == CPU, seed=self.number).to(self.device)
        with mixed:
            loss = self.model(inputs, run_block=run_block) / 63
        with self.held.collecting(last) if self.held else nullcontext():
            (loss * self.optimizers.loss_scale.value).backward()
        self.found.append(loss.detach())  # whose item() would wait for the device
        self.number += 1

    def step(self, micro_batches=3, **how):
        for number in range(1, micro_batches + 1):
            self.backward(number == micro_batches, **how)
        moved = self.optimizers.named
        self.gradients.append({n: p.grad.clone() for n, p in moved.items() if p.grad is not None})
        self.norms.append(self.optimizers.clip_gradients(0.5).item())
        lr = 1e-2 / (1 + self.number)
        if self.held:
            self.held.step(lambda: self.optimizers.step(lr))
        else:
            self.optimizers.step(lr)

    def weights(self):
        return self.held.state_dict() if self.held else self.model.state_dict()

    def state(self):
        return {p: s for part in self.optimizers.parts for p, s in part.state.items()}


def steps(run, count, **how):
    for _ in range(count):
        run.step(**how)
    return run


def assert_same(one, other):
    """Bit for bit: losses, gradient norms, weights, optimizer state."""
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert min(one.norms) > 0.5, "clipping was active"
    for gradients, others in zip(one.gradients, other.gradients, strict=True):
        assert_equal(gradients, others)
    assert_equal(one.weights(), other.weights())
    assert_equal_states(one, other)


def assert_equal(weights, others):
    assert list(weights) == list(others)
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


def assert_equal_states(one, other):
    saved, others = one.optimizers.state_dict()["state"], other.optimizers.state_dict()["state"]
    assert saved.keys() == others.keys() and saved
    for name, state in saved.items():
        assert all(torch.equal(state[key], others[name][key]) for key in state), name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_mixture_is_bitwise_the_plain_run(mixture, kind):
    plain = steps(Run(small(), kind=kind), 4)
    assert_same(steps(Run(small(), MIXTURES[mixture], kind), 4), plain)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_every_placement_that_a_budget_can_ask_for_is_bitwise_the_plain_run(blocks, micro_batches):
    """As things leave one by one; two steps, whose gradients are compared too."""
    plain = steps(Run(small(blocks=blocks)), 2, micro_batches=micro_batches)
    order = moves(parts_of(plain.model, muon=False))
    away = [NOTHING] * (blocks + 1)
    for number, kind in [(0, NOTHING), *order]:
        away[number] = kind
        there = steps(Run(small(blocks=blocks), away), 2, micro_batches=micro_batches)
        assert_same(there, plain)
    assert len(order) == 3 * blocks + 2


def test_a_slot_that_is_not_emptied_is_seen(monkeypatch):
    """One block away: what the next micro-batch writes comes behind the gradients of this one."""
    settle = Landing.settle

    def keeping(landing, turn):
        kept = dict(landing.landing[turn])
        settle(landing, turn)
        landing.landing[turn].update(kept)

    monkeypatch.setattr(Landing, "settle", keeping)
    with pytest.raises((AssertionError, RuntimeError)):
        one_away = [NOTHING, NOTHING, GRADIENTS, NOTHING, NOTHING]
        assert_same(steps(Run(small(), one_away), 2), steps(Run(small()), 2))


HOWS = {
    "dropping": {"dropping": True},
    "recomputed": {"recomputed": True},
    "both": {"dropping": True, "recomputed": True},
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shared", [False, True], ids=["own blocks", "a shared block"])
def test_it_composes_with_dropping_recomputing_and_sharing(how, shared):
    plain = steps(Run(small(shared), kind="muon"), 3, **HOWS[how])
    for mixture in ("gradients", "mixed", "all that can"):
        there = steps(Run(small(shared), MIXTURES[mixture], "muon"), 3, **HOWS[how])
        assert_same(there, plain)


def test_gradients_that_leave_after_the_backward_pass_are_the_same():
    plain = steps(Run(small()), 3)
    for mixture in ("state", "mixed"):
        assert_same(steps(Run(small(), MIXTURES[mixture], early=False), 3), plain)


@pytest.mark.parametrize("mixture", ["state", "gradients", "weights", "mixed"])
def test_bf16_weights_on_the_device_are_what_autocast_makes_of_fp32_ones(mixture):
    """And sums over micro-batches are fp32 in both, so that nothing differs at all."""
    plain = steps(Run(small(), dtype="bf16"), 4)
    there = steps(Run(small(), MIXTURES[mixture], dtype="bf16"), 4)
    assert_same(there, plain)
    narrow = {name for name, p in there.model.named_parameters() if p.dtype == torch.bfloat16}
    left = {"state": 0, "mixed": 2}.get(mixture, 4)  # blocks whose gradients left, 4 matrices each
    assert len(narrow) == 4 * left and all("ln_" not in name for name in narrow)


@pytest.mark.parametrize("mixture", ["state", "gradients", "weights", "mixed"])
def test_an_overflow_of_fp16_skips_the_whole_step_wherever_things_are(mixture):
    """The loss scale is too large at first, until it was halved often enough."""
    runs = Run(small(), dtype="fp16"), Run(small(), MIXTURES[mixture], dtype="fp16")
    start = small().state_dict()
    for run in runs:
        run.optimizers.loss_scale.value = 2.0**20
        while not run.norms or run.norms[-1] == torch.inf or run.norms[-1] != run.norms[-1]:
            assert_equal(run.weights(), start)
            assert not run.state()
            run.step()
        assert len(run.norms) > 2
        assert run.optimizers.loss_scale.value == 2.0 ** (21 - len(run.norms))
        assert all(weight.isfinite().all() for weight in run.weights().values())
        assert not torch.equal(run.weights()["wte.weight"], start["wte.weight"])
        steps(run, 1)  # what the device has is what the optimizer moved
    plain, there = runs
    assert there.losses == plain.losses
    assert_equal(there.weights(), plain.weights())
    assert_equal_states(there, plain)


@pytest.mark.parametrize("name", ["h.1.mlp.c_fc.weight", "h.2.attn.c_attn.weight", "ln_f.bias"])
def test_one_infinite_gradient_on_the_host_or_the_device_skips_the_step(name):
    run = steps(Run(small(), MIXTURES["weights"], "muon", "fp16"), 1)
    run.backward(last=True)
    run.held.parameters()[name].grad[0] = torch.inf
    before = {name: weight.clone() for name, weight in run.weights().items()}
    scale = run.optimizers.loss_scale.value
    run.optimizers.clip_gradients(0.5)
    run.held.step(lambda: run.optimizers.step(1e-2))
    assert_equal(run.weights(), before)
    assert run.optimizers.loss_scale.value == scale / 2
    steps(run, 1)
    assert not torch.equal(run.weights()[name], before[name])


def test_an_overflow_that_nobody_notices_is_seen(monkeypatch):
    monkeypatch.setattr(LossScale, "update", lambda scale, norm: None)
    with pytest.raises(AssertionError):
        test_one_infinite_gradient_on_the_host_or_the_device_skips_the_step("ln_f.bias")


def test_bf16_with_a_shared_block_is_close():
    """Its two gradients are added up in bf16 by autograd, wherever the cast stands."""
    plain = steps(Run(small(shared=True), kind="muon", dtype="bf16"), 4)
    there = steps(Run(small(shared=True), MIXTURES["weights"], "muon", "bf16"), 4)
    assert there.losses == pytest.approx(plain.losses, rel=2e-3)


@pytest.mark.parametrize(("kind", "pos"), [("gpt", "rope"), ("bert", "learned")])
def test_other_models(kind, pos):
    plain = steps(Run(small(kind=kind, pos=pos)), 2)
    assert_same(steps(Run(small(kind=kind, pos=pos), MIXTURES["all that can"]), 2), plain)


def test_compiled_blocks_are_the_same_and_share_their_code():
    """One graph of parameters, one of fetched weights."""

    def compiled(mixture):
        torch.compiler.reset()
        run, counter = Run(small(), MIXTURES[mixture]), CompileCounter()
        for block in run.model.h:
            block.compile(backend=counter, dynamic=False)
        return steps(run, 2), counter.frame_count

    (plain, of_plain), (streamed, of_streamed) = compiled("nothing"), compiled("weights")
    mixed, of_mixed = compiled("mixed")
    assert (of_plain, of_streamed, of_mixed) == (1, 1, 2)
    assert_same(streamed, plain)
    assert_same(mixed, plain)


def test_an_evaluation_streams_weights():
    there, plain = steps(Run(small(), MIXTURES["weights"]), 1), steps(Run(small()), 1)
    with torch.no_grad():
        found = there.model(batch(seed=9), run_block=there.run_block(9))
        assert torch.equal(found, plain.model(batch(seed=9)))
    assert_same(steps(there, 1), steps(plain, 1))


def test_a_block_whose_weights_are_away_cannot_run_by_mistake():
    there = Run(small(), MIXTURES["mixed"])
    assert there.model(batch(seed=0)).isnan()
    assert not there.model(batch(seed=0), run_block=there.run_block(0)).isnan()


# Negative controls: what the tests above would see


def differs(monkeypatch, owner, name, broken, mixture="mixed"):
    plain = steps(Run(small()), 2)
    monkeypatch.setattr(owner, name, broken)
    there = steps(Run(small(), MIXTURES[mixture]), 2)
    with pytest.raises(AssertionError):
        assert_same(there, plain)
    return plain, there


@pytest.mark.parametrize("mixture", ["state", "gradients", "weights"])
def test_a_gradient_that_is_freed_before_accumulation_ends_is_seen(monkeypatch, mixture):
    settle, ready = Landing.settle, Offloaded.ready

    def forgetting(landing, turn):
        landing.arrived.clear()
        settle(landing, turn)

    def always(held, one, parameter):
        held.is_last = True
        ready(held, one, parameter)

    monkeypatch.setattr(Offloaded, "ready", always)
    assert_same(steps(Run(small(), MIXTURES[mixture]), 2), steps(Run(small()), 2))
    differs(monkeypatch, Landing, "settle", forgetting, mixture)


def test_clipping_without_the_hosts_part_is_seen(monkeypatch):
    give = Offloaded.give

    def too_late(held, ones):
        if len(ones) < len(held.all_hosted()):  # as a step gives them, part by part
            give(held, ones)

    plain, there = differs(monkeypatch, Offloaded, "give", too_late)
    assert there.losses[0] == plain.losses[0] and there.norms[0] < plain.norms[0]


def test_weights_that_do_not_go_back_are_seen(monkeypatch):
    send = Offloaded.send

    def once(held, ones):
        if not held.landing.arrived:
            send(held, ones)

    plain, there = differs(monkeypatch, Offloaded, "send", once, "state")
    assert there.norms[0] == plain.norms[0] and there.losses[3] != plain.losses[3]


def test_weights_fetched_before_the_step_are_not_used_after_it(monkeypatch):
    there = Run(small(), MIXTURES["weights"])
    there.step()
    there.held.fetch(0)
    there.step()
    assert_same(there, steps(Run(small()), 2))


# Streams, whose copies are made when someone waits for them and not before


class Late:
    """A copy's event: waiting for it makes all copies up to it."""

    def __init__(self, queue, pairs):
        self.queue = queue
        queue.append((self, pairs))

    def synchronize(self):
        while any(event is self for event, _ in self.queue):
            for target, source in self.queue.pop(0)[1]:
                with torch.no_grad():
                    target.copy_(source() if isinstance(source, weakref.ref) else source)


@pytest.fixture
def late_copies(monkeypatch):
    up, down = [], []

    def copy_down(link, pairs):  # a gradient that nobody holds until then is lost
        return Late(down, [(target, weakref.ref(source)) for target, source in pairs])

    monkeypatch.setattr(Link, "copy_up", lambda link, pairs: Late(up, list(pairs)))
    monkeypatch.setattr(Link, "copy_down", copy_down)
    monkeypatch.setattr(Link, "wait", lambda link, event: event.synchronize())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_copy_is_waited_for_and_nothing_is_overwritten_before(mixture, dtype, late_copies):
    plain = steps(Run(small(), dtype=dtype), 3)
    assert_same(steps(Run(small(), MIXTURES[mixture], dtype=dtype), 3), plain)


def test_a_copy_that_nobody_waits_for_is_seen(late_copies, monkeypatch):
    monkeypatch.setattr(Link, "wait", lambda link, event: None)
    for mixture in ("state", "weights"):
        with pytest.raises(AssertionError):
            assert_same(steps(Run(small(), MIXTURES[mixture]), 2), steps(Run(small()), 2))


# Streams that run beside each other: what no wait puts in order is a race


class Race(AssertionError):
    """Two accesses to one memory, one of them a write, of which either may come first."""


class Stream:
    """A stream of a GPU, or the host, as a vector clock: what of the others it comes after."""

    def __init__(self, name):
        self.name, self.after = name, Counter()

    def wait_stream(self, other):
        self.after |= other.after  # the later one of each

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
    time: int  # of that stream
    writes: bool


class Gpu(TorchDispatchMode):
    """Runs what a CPU does as if copies were a GPU's, on streams, and finds races among them.

    What touches the link's memory is the host's, or a copy's if a stream of the link is current;
    everything else is on the device. Its memory goes back to the stream that asked for it, which
    may then write there, as torch's allocator has it. What a stream does comes after all that the
    host did before it was told to; the host comes after a stream where it waits for an event, or
    reads a number.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.host, self.compute, self.up, self.down = map(Stream, ("host", "compute", "up", "down"))
        self.host.waits = self.host.reads = 0  # of events, of numbers
        for stream in (self.compute, self.up, self.down):
            stream.host = self.host
        self.current, self.held = self.compute, None
        self.accesses = defaultdict(list)  # by storage
        self.bytes = self.peak = 0  # of the device
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    def follow(self, run):
        """From here on this run's copies are a GPU's."""
        self.held = run.held
        run.held.link.up, run.held.link.down = self.up, self.down

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream or self.current
        yield
        self.current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if self.held is None or is_view:
            return out
        arguments = dict(zip([a.name for a in func._schema.arguments], args, strict=False))
        arguments |= kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host.after |= self.compute.after
            self.host.reads += 1
        writes = {
            a.name: bool(a.alias_info and a.alias_info.is_write) for a in func._schema.arguments
        }
        touched = [
            (tensor, writes.get(name, False))
            for name, value in arguments.items()
            for tensor in tree_leaves(value)
            if isinstance(tensor, torch.Tensor) and "empty" not in func.name()  # only its shape
        ]
        is_copy = self.current in (self.up, self.down)
        by_host = not is_copy and any(is_on_host(self.held, tensor) for tensor, _ in touched)
        for tensor, is_written in touched:
            if not by_host or is_on_host(self.held, tensor):
                self.touch(tensor, self.host if by_host else self.current, is_written)
        made = [] if by_host else [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        for tensor in made:
            self.touch(
                tensor, self.current, tensor.untyped_storage().data_ptr() not in self.accesses
            )
        return out

    def touch(self, tensor, stream, writes):
        storage = tensor.untyped_storage()
        key, begin = storage.data_ptr(), tensor.data_ptr()
        if not storage.nbytes():
            return
        if key not in self.accesses and not is_on_host(self.held, tensor):
            whole = (key, key + storage.nbytes())
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.free, key, whole, self.current)
        self.access(key, begin, begin + tensor.nbytes, stream, writes)

    def free(self, key, whole, owner):
        if self.held:
            try:
                self.access(key, *whole, owner, True)
            except Race as race:  # a finalizer's error is nobody's
                self.host.race = race
        self.accesses.pop(key, None)
        self.bytes -= whole[1] - whole[0]

    def access(self, key, begin, end, stream, writes):
        stream.after |= self.host.after
        stream.after[stream.name] += 1
        later = []
        for other in self.accesses[key]:
            if other.begin < end and begin < other.end and (writes or other.writes):
                if stream.after[other.stream.name] < other.time:
                    raise Race(f"{stream.name} and {other.stream.name}: {end - begin} bytes")
                if begin <= other.begin and other.end <= end and writes:
                    continue  # who comes after this comes after that
            later.append(other)
        self.accesses[key] = [*later, Access(begin, end, stream, stream.after[stream.name], writes)]

    def __exit__(self, *error):
        self.held = None
        super().__exit__(*error)
        if hasattr(self.host, "race") and not error[0]:
            raise self.host.race


def on_streams(monkeypatch, mixture, dtype="fp32", count=2, micro_batches=3):
    """Steps on such a GPU; returns the run and how often the host waited for a copy."""
    run = Run(small(), MIXTURES[mixture], dtype=dtype)
    gpu = Gpu(monkeypatch)
    with gpu:
        gpu.follow(run)
        run.held.send(run.held.all_hosted())
        steps(run, count, micro_batches=micro_batches)
    return run, gpu.host.waits


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_no_two_streams_touch_the_same_memory_without_order(mixture, dtype, monkeypatch):
    there, _ = on_streams(monkeypatch, mixture, dtype)
    assert_same(there, steps(Run(small(), dtype=dtype), 2))


def no_wait_for_weights(monkeypatch):
    monkeypatch.setattr(Link, "wait", lambda link, event: None)


def no_wait_for_what_is_computed(monkeypatch):
    monkeypatch.setattr(Stream, "wait_stream", lambda stream, other: None)


def no_wait_for_gradients(monkeypatch):
    monkeypatch.setattr(Event, "synchronize", lambda event: None)


def gradients_let_go(monkeypatch):
    begin = Landing.begin

    def forgetting(landing, name, group, gradient):
        begin(landing, name, group, gradient)
        slot = landing.landing[landing.turn]
        slot[name] = None, slot[name][1]

    monkeypatch.setattr(Landing, "begin", forgetting)


def memory_of_the_copying_stream(monkeypatch):
    fetch = Offloaded.fetch

    def elsewhere(held, layer):
        with torch.cuda.stream(held.link.up):
            return fetch(held, layer)

    monkeypatch.setattr(Offloaded, "fetch", elsewhere)


@pytest.mark.parametrize(
    ("broken", "mixture"),
    [
        (no_wait_for_weights, "state"),
        (no_wait_for_weights, "weights"),
        (no_wait_for_what_is_computed, "gradients"),
        (no_wait_for_what_is_computed, "weights"),
        (no_wait_for_gradients, "state"),
        (no_wait_for_gradients, "gradients"),
        (gradients_let_go, "gradients"),
        (memory_of_the_copying_stream, "weights"),
    ],
)
def test_a_wait_that_is_missing_is_a_race(broken, mixture, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(Race):
        on_streams(monkeypatch, mixture)


def log_of_copies(monkeypatch, run):
    """("copy", layer) as its weights set out, ("compute", layer) as it begins, ("step", None)."""
    log, copy_up = [], Link.copy_up
    layers = {ones[0].sent.data_ptr(): layer for layer, ones in run.held.streamed.items()}

    def noted(link, pairs):
        pairs = list(pairs)
        log.extend(("copy", layers[p[1].data_ptr()]) for p in pairs if p[1].data_ptr() in layers)
        return copy_up(link, pairs)

    monkeypatch.setattr(Link, "copy_up", noted)
    for layer, block in enumerate(run.model.h):
        block.register_forward_pre_hook(lambda *_, layer=layer: log.append(("compute", layer)))
    for _ in range(2):
        run.step()
        log.append(("step", None))
    return log


def check_that_copies_come_early(log):
    """A block's copy begins before the block in front of it does, or the step."""
    for number, (what, layer) in enumerate(log[1:], 1):
        since = number
        while what == "compute" and since and log[since - 1][0] == "copy":
            since -= 1
        in_between = {copied for _, copied in log[since:number]}
        assert layer not in in_between, f"{layer} was fetched when it was needed: {log[:number]}"


def test_a_blocks_weights_are_on_their_way_while_the_block_before_it_computes(monkeypatch):
    """Also where the backward pass begins, and the next forward pass: those weights just stay."""
    run = Run(small(), MIXTURES["weights"])
    log = log_of_copies(monkeypatch, run)[1:]  # the first block of all has none before it
    check_that_copies_come_early(log)
    first_step = log[: log.index(("step", None))]
    assert [layer for what, layer in first_step if what == "compute"] == 3 * [
        0,
        1,
        2,
        3,
        3,
        2,
        1,
        0,
    ]
    second_step = log[len(first_step) + 1 :]
    copied = [layer for what, layer in second_step if what == "copy"]
    assert copied == [*3 * [1, 2, 3, 2, 1, 0], 0], "and then that of the next step"
    a_block = run.held.placement.parts[1].numel * 4
    assert len(copied) * a_block == run.held.placement.traffic(Work(72, 3)).to_device


def test_copies_that_come_late_are_seen(monkeypatch):
    lent = Offloaded.lent
    monkeypatch.setattr(Offloaded, "lent", lambda held, layer, following: lent(held, layer, layer))
    with pytest.raises(AssertionError, match="when it was needed"):
        check_that_copies_come_early(
            log_of_copies(monkeypatch, Run(small(), MIXTURES["weights"]))[1:]
        )


def test_the_host_waits_for_gradients_that_landed_two_blocks_ago_and_for_nothing_else(monkeypatch):
    run, gpu = Run(small(), MIXTURES["gradients"]), Gpu(monkeypatch)
    with gpu:
        gpu.follow(run)
        for number in range(1, 4):
            run.backward(last=False)
            assert (gpu.host.waits, gpu.host.reads) == (4 * number - 2, 0)
        run.backward(last=True)
        assert (gpu.host.waits, gpu.host.reads) == (4 * 4, 0)


def test_attention_is_chosen_where_the_rows_are_and_not_where_the_first_block_is(monkeypatch):
    """FSDP2 keeps the weights of an offloaded block on the host until it runs."""
    asked, found, chosen_impl = [], [], packed_attention.chosen_impl

    def noted(device, dtype, *more):
        asked.append((device, dtype))
        return chosen_impl(device, dtype, *more)

    def run_block(layer, block, x, meta):
        found.append(meta.impl)
        return block(x, meta) if layer else x

    monkeypatch.setattr(packed_attention, "chosen_impl", noted)
    model = small()
    model.h[0].to("meta")
    assert model(batch(), run_block=run_block).isfinite()
    with torch.autocast("cpu", torch.bfloat16):
        model(batch(), run_block=run_block)
    assert asked == [("cpu", torch.float32), ("cpu", torch.bfloat16)]
    assert {*found} == {"adaptive"} != {chosen_impl("meta", torch.float32, 8)}


# Page-locked memory


class Driver:
    """CUDA's, which locks so many bytes and no more."""

    def __init__(self, most):
        self.most, self.locked = most, {}

    def cudaHostRegister(self, address, size, flags):
        if sum(self.locked.values()) + size > self.most:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]

    def cudaGetErrorString(self, error):
        return {2: "out of memory"}[error]


SIZES = [(torch.Size([n]), torch.uint8) for n in (600, 300, 200, 2000, 64, 0, 64)]


@pytest.fixture
def locked_by(monkeypatch):
    """(bytes that can be locked) -> a link in pieces of 1,024 bytes, its memory, the driver."""

    def make(most):
        driver, link = Driver(most), Link(CPU)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        monkeypatch.setattr("support.step.link.PIECE", 1024)
        link.up = Stream("up")
        return link, link.memory(SIZES), driver

    return make


def test_memory_is_page_locked_piece_by_piece_and_no_tensor_is_cut(locked_by, capsys):
    """640 + 320 bytes, 256, 2,048 which is more than a piece may have, and 128."""
    link, memory, driver = locked_by(most=10_000)
    assert [piece.nbytes for piece in link.pieces] == [960, 256, 2048, 128]
    assert driver.locked == {piece.data_ptr(): piece.nbytes for piece in link.pieces}
    assert [tensor.shape for tensor in memory] == [shape for shape, _ in SIZES]
    for tensor in memory:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        pieces = driver.locked.items()
        assert not tensor.numel() or any(at <= begin and end <= at + n for at, n in pieces)
    assert capsys.readouterr().err == ""
    del link
    assert driver.locked == {}, "given back with the link"


def test_what_cannot_be_page_locked_is_said_in_one_line_and_works_all_the_same(locked_by, capsys):
    link, memory, driver = locked_by(most=1300)
    assert sum(driver.locked.values()) == 960 + 256
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "1.19 KiB of host memory are page-locked, 2.12 KiB are not (out of memory)" in said
    for number, tensor in enumerate(memory):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in memory[:4]] == [[0], [1], [2], [3]]
    del link
    assert driver.locked == {}


def test_a_refused_lock_leaves_no_error_to_the_next_kernel(locked_by, monkeypatch):
    """CUDA reports it once more, to who asks next: that one fails and is done with."""
    asked = []

    def zeros(*shape, device):
        asked.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    locked_by(most=10_000)
    assert asked == []
    locked_by(most=1300)
    assert asked == [CPU]


# What is where


def test_off_is_identity():
    model = small()
    run = Run(model, MIXTURES["nothing"])
    held = run.held
    pairs = zip(held.parameters().values(), model.parameters(), strict=True)
    assert all(mine is its for mine, its in pairs)
    assert held.run_block(run_plain) is run_plain
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert host_bytes(held) == 0
    calls = []
    held.step(lambda: calls.append(1))
    assert calls == [1]


def host_bytes(held):
    return sum(piece.nbytes for piece in held.link.pieces)


def is_on_host(held, tensor):
    """Whether a tensor is in the host's memory; on a CPU its device does not tell."""
    pieces = {piece.untyped_storage().data_ptr() for piece in held.link.pieces}
    return tensor.untyped_storage().data_ptr() in pieces


def residence(held, state):
    """Where the weights, gradient and state of every parameter are: device, host or None.

    Args: state the optimizers', by the tensors that they move
    """
    movers, found = held.parameters(), {}

    def side(tensor):
        if tensor is None:
            return None
        if is_on_host(held, tensor):
            return "host"
        return "device" if tensor.device == held.device else "elsewhere"

    for name, p in held.model.named_parameters():
        mover = movers[name]
        weights = side(p if p.untyped_storage().nbytes() >= p.nbytes else mover)
        gradient = side(mover.grad if p.grad is None else p.grad)
        tensors = [t for t in state.get(mover, {}).values() if t.ndim]
        beside = side(mover) if all(t.device == mover.device for t in tensors) else "elsewhere"
        found[name] = weights, gradient, beside if tensors else None
    return found


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_tensor_lives_where_the_plan_says(mixture, kind, device):
    run = Run(small(), MIXTURES[mixture], kind, device=device)
    names = [part.name for part in parts_of(run.model, kind == "muon")]
    away = dict(zip(names, MIXTURES[mixture], strict=True))

    def planned(name, p):
        return WHERE[away[part_of(name)] if p.ndim > 1 else NOTHING]

    def where():
        found = residence(run.held, run.state())
        return {name: (found[name], planned(name, p)) for name, p in run.model.named_parameters()}

    run.backward(last=False)
    for (weights, gradient, state), planned_there in where().values():
        assert (weights, gradient, state) == (*planned_there[:2], None) or (
            # in between, the sum of those that leave is the host's, which no optimizer sees yet
            planned_there[1] == "host" and (weights, gradient) == (planned_there[0], None)
        )
    run.backward(last=True)
    for (weights, gradient, _), planned_there in where().values():
        assert (weights, gradient) == (planned_there[0], planned_there[2]), "home for the optimizer"
    run.optimizers.clip_gradients(1.0)
    run.held.step(lambda: run.optimizers.step(1e-3))
    for (weights, gradient, state), planned_there in where().values():
        assert (weights, gradient, state) == (planned_there[0], None, planned_there[2])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_plan_counts_the_bytes_that_are_there(mixture, kind, dtype):
    run = steps(Run(small(), MIXTURES[mixture], kind, dtype), 1)
    placement = placed(run.model, MIXTURES[mixture], kind, dtype)
    movers = set(map(id, run.held.parameters().values()))
    weights = sum(p.untyped_storage().nbytes() for p in run.model.parameters())
    states = {"device": 0, "host": 0}
    for mover, state in run.state().items():
        assert id(mover) in movers
        side = "host" if is_on_host(run.held, mover) else "device"
        states[side] += sum(t.nbytes for t in state.values() if t.ndim)
    casts = sum(
        placement.cast(part, NOTHING) * part.small
        + (placement.cast(part, kind_away) * part.numel if kind_away < WEIGHTS else 0)
        for part, kind_away in zip(placement.parts, placement.away, strict=True)
    )
    gradients = sum(
        4 * part.small + (4 * part.numel if kind_away < GRADIENTS else 0)
        for part, kind_away in zip(placement.parts, placement.away, strict=True)
    )
    found = weights + states["device"] + casts + gradients + placement.in_passing
    placeholders = sum(
        p.itemsize for p in run.model.parameters() if p.untyped_storage().nbytes() < p.nbytes
    )
    assert found - placeholders == placement.device_bytes
    rounding = host_bytes(run.held) + states["host"] - placement.host_bytes
    assert 0 <= rounding < 64 * (2 + 3 * 19)


def most_bytes(run, micro_batches, V, T):
    """The device's peak in a step, by what torch's allocator was asked for, and what was there.

    Of the second step, before which everything that stays is there. AdamW's state of what is away
    is the host's, though not in the link's memory.
    """

    def step():
        for number in range(micro_batches):
            tokens = torch.randint(V, (1, T))
            inputs = Batch(tokens, tokens.roll(-1, 1), None, None)
            loss = run.model(inputs, run_block=run.run_block(0)) / T
            with run.held.collecting(number == micro_batches - 1):
                loss.backward()
            del loss
        run.optimizers.clip_gradients(0.5)
        run.held.step(lambda: run.optimizers.step(1e-3))

    step()
    state = [t for m, s in run.state().items() if not is_on_host(run.held, m) for t in s.values()]
    fetched = [weight for its in run.held.fetched.values() for weight in its.weights]
    tensors = [*run.model.parameters(), *state, *fetched]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    with profile(profile_memory=True) as found:
        step()
    changes = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return sum(storages.values()) + max(accumulate(event.nbytes() for event in changes))


@pytest.mark.parametrize(
    ("blocks", "outside"),
    [(kind, NOTHING) for kind in Away] + [(WEIGHTS, STATE), (WEIGHTS, GRADIENTS)],
)
def test_a_step_takes_the_bytes_that_are_planned(blocks, outside):
    """Within 5 %, with a vocabulary so large that its gradients are most of what comes and goes.

    With one micro-batch nothing is added up, and less is there.
    """
    V, T = 4096, 8
    away = [outside, *[blocks] * 4]
    torch.manual_seed(0)
    model = Transformer(TransformerConfig("gpt", 4, 2, 64, 256, T, V))
    run = Run(model, away)
    planned = run.held.placement.device_bytes
    assert most_bytes(run, 3, V, T) == pytest.approx(planned, rel=0.05)
    assert most_bytes(run, 1, V, T) < 1.01 * planned
    without = planned - run.held.placement.embedding_gradients
    assert most_bytes(run, 3, V, T) > 1.05 * without, "control: as it was counted before"


@pytest.mark.parametrize("mixture", ["nothing", "gradients"])
def test_autocast_keeps_a_copy_of_each_fp32_matrix_and_none_of_bf16_ones(mixture):
    run = Run(small(), MIXTURES[mixture], dtype="bf16")
    matrices = [p for p in run.model.h.parameters() if p.ndim > 1]
    own = {p.untyped_storage().data_ptr() for p in matrices}
    saved = {}

    def pack(tensor):
        if tensor.dtype == torch.bfloat16 and tensor.numel() in {p.numel() for p in matrices}:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run.backward(last=False)
    casts = sum(size for pointer, size in saved.items() if pointer not in own)
    assert casts == {"nothing": 2 * sum(p.numel() for p in matrices), "gradients": 0}[mixture]


def test_what_is_on_its_way_is_of_two_parts_at_most(monkeypatch):
    """And without forgetting fetched weights they would all wait for the backward pass."""
    run = Run(small(), MIXTURES["weights"])
    placement = placed(run.model, MIXTURES["weights"])
    one_part = (placement.in_passing - placement.embedding_gradients) // 4
    begin, fetch = Landing.begin, Offloaded.fetch
    gradients, weights, alive = [], [], []

    def begun(landing, *what):
        begin(landing, *what)
        on_the_way = [gradient for slot in landing.landing for gradient, _ in slot.values()]
        gradients.append(sum(gradient.nbytes for gradient in on_the_way))

    def fetched(held, layer):
        its = fetch(held, layer)
        for weight in its.weights:
            storage = weight.untyped_storage()
            alive.append((StorageWeakRef(storage), storage.nbytes()))
        weights.append(sum(size for storage, size in set_of(alive) if not storage.expired()))
        return its

    def set_of(pairs):
        return {storage.cdata: (storage, size) for storage, size in pairs}.values()

    monkeypatch.setattr(Landing, "begin", begun)
    monkeypatch.setattr(Offloaded, "fetch", fetched)
    run.step()
    assert max(gradients) == 2 * one_part and max(weights) == 2 * one_part
    weights.clear()
    loss = run.model(batch(seed=0), run_block=run.held.run_block(run_plain, recomputes=True))
    assert max(weights) > 2 * one_part
    del loss


def test_the_next_weights_are_on_their_way_past_layers_that_have_none(monkeypatch):
    """Of layers 0 . 2 3, where 2 stays on the device: 3 follows on 0, itself, and 0 again."""
    model = pseudo.share(small(), (0, -1, 2, 3))
    run = Run(model, [NOTHING, WEIGHTS, NOTHING, WEIGHTS])
    lent, seen = Offloaded.lent, []

    def noted(held, layer, following):
        seen.append((layer, layer in held.fetched))
        return lent(held, layer, following)

    monkeypatch.setattr(Offloaded, "lent", noted)
    run.backward(last=True)
    assert seen == [(0, False), (3, True), (3, True), (0, True)]


# Checkpoints


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("pair", [("mixed", None), (None, "mixed"), ("state", "all that can")])
def test_a_run_goes_on_with_another_placement(pair, kind):
    before, after = (MIXTURES.get(name) for name in pair)
    whole = steps(Run(small(), kind=kind), 4)
    first = steps(Run(small(), before, kind), 2)
    file = io.BytesIO()
    torch.save({"model": first.weights(), "optimizers": first.optimizers.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    torch.manual_seed(5)
    second = Run(Transformer(first.model.config), after, kind)
    (second.held or second.model).load_state_dict(saved["model"])
    second.optimizers.load_state_dict(saved["optimizers"])
    second.number = first.number
    steps(second, 2)
    assert first.losses + second.losses == whole.losses
    assert_equal(second.weights(), whole.weights())
    assert_equal_states(second, whole)


def test_names_are_those_of_the_model_and_of_shared_blocks():
    run = Run(small(shared=True), MIXTURES["weights"])
    assert list(run.weights()) == list(run.model.state_dict())
    assert torch.equal(run.weights()["h.3.mlp.c_fc.weight"], run.weights()["h.0.mlp.c_fc.weight"])
    assert_equal(run.weights(), small(shared=True).state_dict())
    with pytest.raises(ValueError, match=r"differs in h\.2"):
        run.held.load_state_dict({k: v for k, v in run.weights().items() if k[:3] != "h.2"})


# Ranks


def rank_of_two(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    for mixture in ("nothing", "state"):
        run = Run(small(), MIXTURES[mixture], early=False)
        wrapped = DistributedDataParallel(run.model, gradient_as_bucket_view=True)
        for number in range(3):
            for last in (False, True):
                wrapped.require_backward_grad_sync = last
                loss = wrapped(batch(seed=10 * number + 2 * last + rank)) / 63
                with run.held.collecting(last):
                    loss.backward()
            run.optimizers.clip_gradients(0.1)
            run.held.step(lambda run=run: run.optimizers.step(1e-2))
        torch.save(run.weights(), f"{folder}/{mixture}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.dist
def test_two_ranks_move_alike_and_as_without(tmp_path):
    start = torch.multiprocessing.start_processes
    start(rank_of_two, (str(tmp_path),), nprocs=2, start_method="forkserver")
    first, *others = [torch.load(file) for file in sorted(tmp_path.glob("*.pt"))]
    assert len(others) == 3
    for other in others:
        assert_equal(other, first)
    assert not torch.equal(first["h.1.mlp.c_fc.weight"], small().h[1].mlp.c_fc.weight)


# A GPU


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_what_a_step_computes_does_not_depend_on_where_things_are(mixture, device):
    """Before the host's AdamW, which rounds otherwise than a GPU's, comes into it."""
    plain = Run(small(), MIXTURES["nothing"], device=device)
    there = Run(small(), MIXTURES[mixture], device=device)
    for run in (plain, there):
        run.backward(last=False)
        run.backward(last=True)
    assert there.losses == plain.losses
    gradients = {name: p.grad.cpu() for name, p in plain.held.parameters().items()}
    for name, p in there.held.parameters().items():
        torch.testing.assert_close(p.grad.cpu(), gradients[name], rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_memory_that_is_copied_is_page_locked_and_no_more_than_asked_for():
    run = Run(small(), MIXTURES["weights"], device=GPU)
    pieces = run.held.link.pieces
    assert (
        all(piece.is_pinned() for piece in pieces) and run.held.all_hosted()[0].master.is_pinned()
    )
    assert host_bytes(run.held) <= run.held.placement.host_bytes + 64 * 100


@pytest.mark.gpu
@pytest.mark.parametrize("mixture", MIXTURES)
def test_on_a_gpu(mixture):
    """The same losses as plain training there, and no more memory than planned."""
    # cuBLAS keeps a workspace of some MiB for each thread that asks it for a product
    warm = torch.ones(64, 64, device=GPU, requires_grad=True)
    (warm @ warm).sum().backward()

    def run(away):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        model = Transformer(TransformerConfig("gpt", 4, 4, 256, 1024, 64, 512))
        held = Offloaded(model, placed(model, away), torch.device("cuda"))
        optimizers = Optimizers(held.parameters(), "adamw", 0.1, (0.9, 0.95))
        losses = []
        for number in range(8):
            tokens = torch.randint(0, 512, (8, 64), generator=torch.Generator().manual_seed(number))
            inputs = Batch(tokens, tokens.roll(-1, 1), None, None).to(torch.device("cuda"))
            with held.collecting(number % 2 == 1):
                loss = model(inputs, run_block=held.run_block(run_plain)) / 512
                loss.backward()
            losses.append(loss.item())
            del loss
            if number % 2:
                optimizers.clip_gradients(0.5)
                held.step(lambda: optimizers.step(1e-3))
        assert torch.cuda.memory_allocated() - before <= placed(model, away).device_bytes + 2**20
        return losses

    assert run(MIXTURES[mixture]) == pytest.approx(run(MIXTURES["nothing"]), rel=1e-4)


# ---- runs

TIGHT = "--offload --offload-budget 380KB"  # of 840 KiB: some weights leave too


def test_off_is_absent(run, log_of, monkeypatch):
    plain = metrics(log_of())
    for name in ("plan", "Offloaded", "budget_bytes"):
        monkeypatch.setattr(offload, name, None)  # a call would fail
    assert metrics(run(out="poisoned")) == plain


@pytest.mark.parametrize(
    ("budget", "more"),
    [
        ("1GB", ""),  # there is room for all
        ("380KB", f"{ALL_ON} --micro-batch-size 2 --checkpoint-activations"),
        ("680KB", "--pseudo --pseudo-group 2 --pseudo-until 0.5 --optimizer adamw"),
        ("480KB", "--model bert --nsp --pack --dropout 0.1"),
    ],
)
def test_a_run_is_bitwise_the_same_with_part_of_it_away(run, log_of, budget, more):
    more = f"{more} --tokens 2048"
    away = run(f"{more} --offload --offload-budget {budget}")
    assert metrics(away) == metrics(log_of(more))


def test_a_checkpoint_does_not_know_where_things_were(run, tmp_path):
    """From with to without, and back."""
    flags = f"{ALL_ON} --keep 9"
    whole = metrics(run(flags, out="whole"))
    run(f"{flags} {TIGHT}", out="away")
    for out, other in (("whole", TIGHT), ("away", "--no-offload --offload-budget auto")):
        for file in sorted((tmp_path / out).glob("step-*.pt"))[2:]:
            file.unlink()
        assert train.main(["--resume", "--out", out, *other.split()]) == 0
        lines = read_log(tmp_path / out)
        assert metrics(lines) == whole
        assert [line["resumed_at"] for line in lines if line["event"] == "run"][1] > 0


def test_the_start_says_what_lives_where_and_so_does_a_switch(run, capsys):
    run(f"--pseudo --pseudo-layers 2 --pseudo-until 0.5 {TIGHT}")
    out = capsys.readouterr().out
    assert "weights last" in out and "budget: " in out and "break-even is" in out
    assert out.count("copies on the way") == 2


def test_a_budget_that_cannot_be_leaves_nothing_behind(run, tmp_path):
    with pytest.raises(ValueError, match=r"--offload-budget 9\.77 KiB is too small"):
        run("--offload --offload-budget 10KB")
    assert not (tmp_path / "run").exists()


def test_what_the_model_becomes_must_fit_when_the_run_starts(run, tmp_path, monkeypatch):
    """One layer of four fits in 335 KB, but all four do not, however little of them stays."""
    flags = "--pseudo --pseudo-layers 1 --pseudo-until 0.5 --offload --offload-budget 335KB"
    with pytest.raises(ValueError, match="is too small"):
        run(flags)
    assert not (tmp_path / "run").exists()
    planned, calls = offload.planned, []

    def planned_later(*arguments):
        calls.append(arguments)
        return planned(*arguments) if len(calls) > 1 else None

    monkeypatch.setattr(offload, "planned", planned_later)
    with pytest.raises(ValueError, match="is too small"):
        run(flags)
    assert (tmp_path / "run").exists(), "so it was noticed in mid-run"
