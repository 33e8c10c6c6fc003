"""A pretended CUDA device: train.py runs on it, and what would cost time on a GPU is counted.

torch's CPU build is told that there is a device `cuda:0` (fake_cuda.cpp). A tensor on it is an
`OnDevice`, which holds its numbers in a tensor of the host, computes with them there, and refuses
what a GPU refuses: to mix devices. So whole runs take every path that asks for CUDA, Triton's
kernels in its interpreter included, and their losses are real. Counted by file of this repository:

    syncs     where the host waits for the device: .item(), a copy to the host, a boolean index
    copies    from the host, pageable or page-locked, waited for or not
    launches  of kernels, by phase: an operator of torch is one, except those over lists of
              tensors, which take as many at once as a launch has room for
    doubles   operators that make float64 on the device

Not modelled: time, memory, the order of streams (tests/test_offload.py has that), several devices,
torch's own compiler. The library has to be loaded before torch is, so this is a process of its own,
which reads commands and writes what it counted:

    python -m tests.fake_cuda LIBRARY.so REPORT.json < runs.json      # see tests/test_fake_cuda.py

    {"plain": {"flags": ["--device", "cuda", ...]},            # of train.py
     "read": {"command": "evaluate", "flags": [...]},          # evaluate.main
     "stopped": {"flags": [...], "stop": 2},                   # by SIGTERM, in its second step
     "broken": {"flags": [...], "patch": {"ltd.draws": "lambda ..."}}}
"""

import collections
import contextlib
import ctypes
import functools
import importlib.util
import inspect
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
TORCH = Path(importlib.util.find_spec("torch").origin).parent


def build(folder: Path) -> Path:
    """Compile fake_cuda.cpp against the torch that is installed: some seconds."""
    library = folder / "fake_cuda.so"
    source = Path(__file__).with_suffix(".cpp")
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}"]
    command = ["c++", *flags, "-o", str(library), str(source), "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def is_cpu_build() -> bool:
    return not (TORCH / "lib" / "libtorch_cuda.so").exists()


def install(library: str) -> None:
    """Before torch is imported: load its CPU library, then tell it of the device."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(TORCH / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library)


if __name__ == "__main__":
    install(sys.argv[1])

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 (it reads torch.cuda before that is replaced)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")

# Operators that launch nothing: they look at a tensor in another way, or only ask for memory.
VIEWS = {
    *("_conj", "_neg_view", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach"),
    *("diagonal", "empty", "empty_like", "empty_strided", "expand", "is_pinned", "lift_fresh"),
    *("new_empty", "new_empty_strided", "permute", "real", "select", "set_", "slice", "split"),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
    *("view_as_complex", "view_as_real"),
}
WAITS = {"_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero"}
# torch/aten/src/ATen/native/cuda/MultiTensorApply.cuh: tensors in a launch by lists that it has,
# and blocks in a launch, of so many elements each.
TENSORS_IN_A_LAUNCH, BLOCKS_IN_A_LAUNCH, ELEMENTS_OF_A_BLOCK = (110, 64, 48, 36, 30), 320, 65_536


def where() -> str:
    """The innermost file of this repository on the stack, its tests left out."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else None
        if place and not {"tests", "site-packages"} & {*place.parts}:
            return place.as_posix()
    return "torch"


class Counts:
    """The costs since `clear`; `phase` names the part of a step."""

    def __init__(self) -> None:
        self.phase = ""
        self.locked: dict[int, int] = {}  # addresses of the host, and where each piece ends
        self.clear()

    def clear(self) -> None:
        for name in ("syncs", "copies", "launches", "doubles"):
            setattr(self, name, collections.Counter())

    def sync(self, kind: str) -> None:
        self.syncs[f"{self.phase}: {kind} in {where()}"] += 1

    def lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the host's memory of a tensor page-locked, until the tensor is gone."""
        address = tensor.data_ptr()
        self.locked[address] = address + tensor.nbytes
        weakref.finalize(tensor, self.locked.pop, address, None)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(start <= address < stop for start, stop in list(self.locked.items()))

    def report(self) -> dict[str, dict]:
        return {name: dict(n) for name, n in vars(self).items() if name not in ("phase", "locked")}


COUNTS = Counts()


class OnDevice(torch.Tensor):
    """A tensor on cuda:0, of which `inner` has the numbers."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnDevice":
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Device(TorchDispatchMode):
    """Makes tensors on the device where an operator without any asks for it."""

    __torch_dispatch__ = OnDevice.__torch_dispatch__.__func__


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator as torch would run it, if the device were there."""
    if torch.is_inference_mode_enabled() and func._can_decompose():  # autograd did not do it
        with Device():
            return func.decompose(*args, **kwargs)
    name = func._schema.name.split("::")[1]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    asked = kwargs.get("device")
    to = None if asked is None else torch.device(asked)
    inputs_on_device = any(isinstance(tensor, OnDevice) for tensor in tensors)
    if not inputs_on_device and (to is None or to.type != "cuda"):
        is_pinned = kwargs.pop("pin_memory", False)
        made = func(*args, **kwargs)
        return COUNTS.lock(made) if is_pinned else made
    makes_on_device = to.type == "cuda" if to else inputs_on_device
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if name == "_to_copy":
        count_copy(args[0], makes_on_device, non_blocking)
    elif name == "copy_":
        makes_on_device = isinstance(args[0], OnDevice)
        count_copy(args[1], makes_on_device, non_blocking)
    else:
        refuse_mix(name, args, tensors)
    if name == "is_pinned":
        return False
    if name in WAITS:
        COUNTS.sync(name)
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        count_index(name, args)
    if name not in VIEWS and name not in WAITS:
        COUNTS.launches[COUNTS.phase] += launches_of(name, args)

    inner = tree_map_only(OnDevice, lambda tensor: tensor.inner, (args, kwargs))
    if to is not None:
        inner[1]["device"] = CPU
    inner[1].pop("pin_memory", None)
    if func == torch.ops.aten.addmm.dtype_out:  # of a GPU alone: 16-bit matrices into float32
        added, left, right, _ = inner[0]
        found = torch.addmm(added, left.float(), right.float(), **inner[1])
    else:
        found = func(*inner[0], **inner[1])
    wrappers = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, OnDevice)}

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in wrappers:  # an operator in place returns what it was given
            return wrappers[id(tensor)]
        if not makes_on_device or any(tensor is given for given in tensors):
            return tensor
        if tensor.dtype == torch.float64 and name not in VIEWS:
            COUNTS.doubles[f"{name} in {where()}"] += 1
        return OnDevice(tensor)

    return tree_map_only(torch.Tensor, on_device, found)


def refuse_mix(name: str, args: tuple, tensors: list[torch.Tensor]) -> None:
    """As torch does; a number of the host, and an index from there, are taken."""
    indices = args[1] if name.startswith(("index", "_index")) and len(args) > 1 else ()
    allowed = {id(index) for index in tree_leaves(indices)}
    for tensor in tensors:
        if not isinstance(tensor, OnDevice) and tensor.ndim and id(tensor) not in allowed:
            raise RuntimeError(f"Expected all tensors on the same device: {name} in {where()}")


def count_copy(source: torch.Tensor, to_device: bool, non_blocking: bool) -> None:
    """A copy within the device is a launch, and one within the host does not come here."""
    from_device = isinstance(source, OnDevice)
    if from_device == to_device:
        return
    kind = "page-locked" if COUNTS.is_pinned(source) else "pageable"
    way = "to the host" if from_device else f"from {kind} memory"
    COUNTS.copies[f"{COUNTS.phase}: {way} in {where()}"] += 1
    if not non_blocking:
        COUNTS.sync(f"a copy {'to' if from_device else 'from'} the host")


def count_index(name: str, args: tuple) -> None:
    for index in args[1]:
        if index is None:
            continue
        fills = name != "index" and args[2].numel() == 1  # which is masked_fill
        if index.dtype in (torch.bool, torch.uint8) and not fills:
            COUNTS.sync("a boolean index")
        if not isinstance(index, OnDevice):
            COUNTS.sync("an index from the host")


def launches_of(name: str, args: tuple) -> int:
    """One, unless an operator takes lists of tensors."""
    if not name.startswith(("_foreach", "_fused", "_amp_foreach")):
        return 1
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg]
    most = TENSORS_IN_A_LAUNCH[min(len(lists), len(TENSORS_IN_A_LAUNCH)) - 1]
    blocks = sum(math.ceil(tensor.numel() / ELEMENTS_OF_A_BLOCK) for tensor in lists[0])
    return max(math.ceil(len(lists[0]) / most), math.ceil(blocks / BLOCKS_IN_A_LAUNCH))


# ---- what torch.cuda has, where it is not an operator


class Event:
    """Also a stream: whatever is asked of either is done at once, and only waiting is counted."""

    device = CUDA

    def __init__(self, *args: Any, **options: Any):
        pass

    def record_event(self, event: Any = None) -> "Event":
        return Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        COUNTS.sync("synchronize")

    def __getattr__(self, name: str) -> Callable:
        if name not in ("record", "wait", "wait_stream", "wait_event"):
            raise AttributeError(name)
        return lambda *args: None


class Cudart:
    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        COUNTS.locked[address] = address + size
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return COUNTS.locked.pop(address) and 0


class Properties:
    """Of an H200."""

    name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132
    total_memory = 141 * 10**9
    shared_memory_per_block_optin = 232_448
    is_integrated = False


class Attention(torch.autograd.Function):
    """torch's attention, which is one launch forward and one backward on a GPU."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, causal: bool):
        if attn_mask is not None and not isinstance(attn_mask, OnDevice):
            raise RuntimeError(f"attention on cuda:0 with a mask on the cpu, in {where()}")
        mask = None if attn_mask is None else attn_mask.inner
        ctx.save_for_backward(q, k, v)
        ctx.more = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": causal}
        COUNTS.launches[COUNTS.phase] += 1
        q, k, v = (x.inner for x in (q, k, v))
        return OnDevice(HOST_ATTENTION(q, k, v, **ctx.more))

    @staticmethod
    def backward(ctx: Any, dout: OnDevice) -> tuple:
        COUNTS.launches[COUNTS.phase] += 1
        q, k, v = (x.inner.detach().requires_grad_() for x in ctx.saved_tensors)
        # the engine's thread for the device runs this without the mode
        with torch.enable_grad():
            out = HOST_ATTENTION(q, k, v, **ctx.more)
        return *map(OnDevice, torch.autograd.grad(out, (q, k, v), dout.inner)), None, None, None


HOST_ATTENTION = torch.nn.functional.scaled_dot_product_attention


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **more: Any):
    if not isinstance(q, OnDevice):
        return HOST_ATTENTION(q, k, v, attn_mask, dropout_p, is_causal, **more)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        attn_mask = attn_mask.to(dtype) if attn_mask is not None else None
    return Attention.apply(q, k, v, attn_mask, dropout_p, is_causal)


def in_fp32(tensor: OnDevice) -> torch.Tensor:
    """Triton's interpreter takes the bits of bfloat16 for integers where it multiplies matrices."""
    inner = tensor.inner
    if inner.dtype != torch.bfloat16:
        return inner
    return torch.empty_strided(inner.shape, inner.stride(), dtype=torch.float32).copy_(inner)


class Kernel:
    """A Triton kernel in its interpreter, on the numbers that the device's tensors hold."""

    def __init__(self, kernel: Any, name: str):
        self.kernel, self.name = kernel, name

    def __getitem__(self, grid: Any) -> Callable:
        def launch(*args: Any, **constants: Any) -> None:
            for arg in args:
                if isinstance(arg, torch.Tensor) and not isinstance(arg, OnDevice):
                    raise RuntimeError(f"Pointer argument of {self.name} is on the cpu")
            COUNTS.launches[COUNTS.phase] += 1
            inner = tree_map_only(OnDevice, in_fp32, args)
            with torch.utils._python_dispatch._disable_current_modes():
                self.kernel[grid](*inner, **constants)
            for given, used in zip(args, inner, strict=True):
                if isinstance(given, OnDevice) and used is not given.inner:
                    given.inner.copy_(used)

        return launch


def patch_kernels() -> None:
    """Every kernel of the folder `kernels` takes the device's tensors."""
    from triton.runtime import interpreter

    # it lists the members of triton.language anew in every call, half of a kernel's time
    members = {"getmembers": functools.cache(inspect.getmembers)}
    interpreter.inspect = types.SimpleNamespace(**vars(inspect) | members)
    for file in sorted((ROOT / "kernels").glob("*.py")):
        module = importlib.import_module(f"kernels.{file.stem}")
        for name, value in list(vars(module).items()):
            if isinstance(value, interpreter.InterpretedFunction) and name.endswith("kernel"):
                setattr(module, name, Kernel(value, name))


def patch_torch() -> None:
    """Answers of torch.cuda, and what reaches memory without an operator."""
    cuda = torch.cuda
    answers = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("current_stream", "default_stream"), Event()),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), 10**9),
        **dict.fromkeys(("init", "_lazy_init", "set_device", "reset_peak_memory_stats"), None),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), None),
        **{"device_count": 1, "current_device": 0, "is_current_stream_capturing": False},
        "get_device_name": Properties.name,
        "get_device_capability": (Properties.major, Properties.minor),
        "get_device_properties": Properties,
        "mem_get_info": (139 * 10**9, Properties.total_memory),
        "cudart": Cudart,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **more: answer)
    cuda.Stream = cuda.Event = Event
    cuda.stream = cuda.device_of = cuda.device = lambda *args: contextlib.nullcontext()
    cuda.synchronize = lambda *args: COUNTS.sync("torch.cuda.synchronize")
    cuda.amp.common.amp_definitely_not_available = lambda: False
    cuda.graphs.is_current_stream_capturing = lambda: False
    torch.nn.functional.scaled_dot_product_attention = attention
    # torch takes lists of tensors at once only if each has a type of its own
    torch.utils._foreach_utils._has_foreach_support = lambda tensors, device: True
    torch.nn.utils.clip_grad._has_foreach_support = lambda tensors, device: True

    torch.Tensor.pin_memory = lambda tensor, *args: COUNTS.lock(tensor.clone())
    torch.Tensor.is_pinned = lambda tensor, *args: COUNTS.is_pinned(tensor)

    def made(make: Callable) -> Callable:
        def call(data: Any, *args: Any, device: Any = None, **more: Any) -> torch.Tensor:
            tensor = make(data, *args, **more)
            return tensor if device is None else tensor.to(device)  # a copy that is waited for

        return call

    save = torch.save

    def save_from_host(state: Any, *args: Any, **more: Any) -> None:
        save(tree_map_only(OnDevice, lambda tensor: tensor.inner, state), *args, **more)

    torch.save = save_from_host
    torch.tensor, torch.as_tensor = made(torch.tensor), made(torch.as_tensor)

    data = torch._C.TensorBase.data

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        """`tensor.data = value` also where it moves between host and device."""
        if isinstance(self, OnDevice) == isinstance(value, OnDevice):
            data.__set__(self, value)
            if isinstance(self, OnDevice):
                self.inner = value.inner
            return
        other = value.detach().requires_grad_(self.requires_grad)
        other._is_param = isinstance(self, torch.nn.Parameter)
        torch.utils.swap_tensors(self, other)

    torch.Tensor.data = property(data.__get__, set_data)
    thread_run = threading.Thread.run

    def run_with_device(self: threading.Thread) -> None:
        with Device():  # a mode is a thread's own
            thread_run(self)

    threading.Thread.run = run_with_device


@contextlib.contextmanager
def steps_of_train(stop: int | None) -> Iterator[list[dict]]:
    """The costs of each step of a run of train.py; a SIGTERM comes in step number `stop`."""
    trainer, steps = importlib.import_module("train").Trainer, []
    step = trainer.step

    def named(phase: str, method: Callable) -> Callable:
        def call(self: Any, *args: Any, **more: Any) -> Any:
            with mock.patch.object(COUNTS, "phase", phase):
                return method(self, *args, **more)

        return call

    def counted(self: Any, todo: Any) -> Any:
        if todo.after.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        COUNTS.clear()
        done = step(self, todo)
        steps.append(COUNTS.report() | {"loss": done.loss})
        return done

    phases = {phase: named(phase, getattr(trainer, phase)) for phase in ("gradients", "update")}
    with mock.patch.multiple(trainer, step=counted, **phases):
        yield steps


def run_command(flags: list[str], command="train", stop=None, patch=None) -> dict[str, Any]:
    """A command of this repository: its status, its output, and the costs of each step."""
    COUNTS.phase, error, said = "run", "", io.StringIO()
    with contextlib.ExitStack() as around:
        around.enter_context(contextlib.redirect_stdout(said))
        for target, source in (patch or {}).items():
            around.enter_context(mock.patch(target, eval(source, globals())))
        steps = around.enter_context(steps_of_train(stop))
        try:
            status = importlib.import_module(command).main(flags) or 0
        except Exception:
            status, error = 1, traceback.format_exc()
    return {"status": status, "error": error, "said": said.getvalue(), "steps": steps}


def main() -> None:
    runs = json.load(sys.stdin)
    patch_torch()
    patch_kernels()
    torch.set_num_threads(1)
    with Device():
        reports = {name: run_command(**run) for name, run in runs.items()}
    Path(sys.argv[2]).write_text(json.dumps(reports))


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path.insert(0, str(ROOT))
    main()
