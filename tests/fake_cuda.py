"""A fake CUDA device: train.py runs on it, and what would cost time on a GPU is counted.

fake_cuda.cpp makes torch's CPU build believe that there is a device `cuda:0`. A tensor on it is an
`OnDevice`: it keeps its numbers in a CPU tensor, computes with them on the CPU, and refuses to mix
devices, as a GPU does. So whole runs take every code path for CUDA, including the Triton kernels
(in the interpreter), and their losses are real. Counted for each file of this repository:

    waits for ...                  the host waits for the device: .item(), a copy, a boolean index
    copies from pageable memory    of the host to the device
    computes in float64            on the device

Not modelled: time, memory, launches, the order of streams (see tests/test_offload.py), several
devices, torch.compile. The library must be loaded before torch, so this runs in a separate process,
which reads commands and writes what it counted:

    python -m tests.fake_cuda LIBRARY.so REPORT.json < runs.json      # see tests/test_fake_cuda.py

    {"plain": {"flags": ["--device", "cuda", ...]},            # of train.py
     "read": {"command": "evaluate", "flags": [...]},          # of evaluate.py
     "stopped": {"flags": [...], "stop": 2},                   # SIGTERM in its second step
     "broken": {"flags": [...], "patch": {"ltd.draw_for_layers": "lambda ..."}}}
"""

import collections
import contextlib
import ctypes
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
TORCH = Path(importlib.util.find_spec("torch").origin).parent


def build(folder: Path) -> Path:
    """Compile fake_cuda.cpp against the installed torch, which takes some seconds."""
    library, source = folder / "fake_cuda.so", Path(__file__).with_suffix(".cpp")
    flags = f"-std=c++20 -shared -fPIC -I{TORCH}/include".split()
    link = f"-L{TORCH}/lib -Wl,-rpath,{TORCH}/lib -lc10 -ltorch_cpu".split()
    command = ["c++", *flags, "-o", str(library), str(source), *link]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 (must read torch.cuda before patch_torch replaces it)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
WAITS = {"_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COUNTS = collections.Counter()  # of the current step
LOCKED: dict[int, int] = {}  # page-locked memory: address -> end of each piece


def count(what: str) -> None:
    """Count this for the innermost file of this repository on the stack, not counting tests."""
    frame, file = sys._getframe(), "torch"
    while frame and file == "torch":
        path, frame = Path(frame.f_code.co_filename), frame.f_back
        inside = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ("tests",)
        if not {"tests", "site-packages"} & {*inside}:
            file = path.name
    COUNTS[f"{what} in {file}"] += 1


def lock(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a CPU tensor's memory as page-locked until the tensor is freed."""
    address = tensor.data_ptr()
    LOCKED[address] = address + tensor.nbytes
    weakref.finalize(tensor, LOCKED.pop, address, None)
    return tensor


def is_locked(tensor: torch.Tensor, *_: object) -> bool:
    address = tensor.data_ptr()
    return any(start <= address < stop for start, stop in list(LOCKED.items()))


class OnDevice(torch.Tensor):
    """A tensor on cuda:0, whose numbers are in the CPU tensor `inner`."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnDevice":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        about = {"dtype": inner.dtype, "device": CUDA, **layout}
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **about)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.inner.__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Device(TorchDispatchMode):
    """Sends operators without tensor arguments to the device too, if they ask for it."""

    __torch_dispatch__ = OnDevice.__torch_dispatch__.__func__


def map_tensors(change: Callable, value: Any) -> Any:
    """Apply `change` to every tensor; torch's tree_map would take a tenth of a whole run."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(change, item) for item in value])
    return value


def unwrap(value: Any) -> Any:
    return map_tensors(lambda x: x.inner if isinstance(x, OnDevice) else x, value)


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator as torch would if the device existed."""
    if torch.is_inference_mode_enabled() and func._can_decompose():  # because autograd did not
        with Device():
            return func.decompose(*args, **kwargs)
    name = func._schema.name.split("::")[1]
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, (args, *kwargs.values()))
    wrappers = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
    asked = kwargs.get("device")
    makes_on_device = bool(wrappers) if asked is None else torch.device(asked).type == "cuda"
    if not wrappers and not makes_on_device:
        is_pinned = kwargs.pop("pin_memory", False)
        made = func(*args, **kwargs)
        return lock(made) if is_pinned else made
    if name == "copy_":
        makes_on_device = isinstance(args[0], OnDevice)
    if name in ("copy_", "_to_copy"):
        source = args[name == "copy_"]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        count_copy(source, makes_on_device, waits)
    else:
        refuse_mix(name, args, tensors)
    if name in WAITS:
        count(f"waits for {name}")
    if name in INDEXING:
        count_index(name, args)

    kwargs.pop("pin_memory", None)
    inner_args = unwrap(args)
    inner_kwargs = {key: unwrap(value) for key, value in kwargs.items()}
    inner_kwargs |= {} if asked is None else {"device": CPU}
    if func == torch.ops.aten.addmm.dtype_out:  # exists only on GPUs: 16-bit matrices into float32
        added, left, right, _ = inner_args
        result = torch.addmm(added, left.float(), right.float(), **inner_kwargs)
    else:
        result = func(*inner_args, **inner_kwargs)

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in wrappers:  # an in-place operator returns its argument
            return wrappers[id(tensor)]
        if tensor.dtype == torch.float64:
            count("computes in float64")
        return OnDevice(tensor)

    return map_tensors(on_device, result) if makes_on_device else result


def refuse_mix(name: str, args: tuple, tensors: list[torch.Tensor]) -> None:
    """Refuse what torch refuses: only a scalar or an index may come from the host."""
    allowed = {id(index) for index in args[1]} if name in INDEXING else ()
    for tensor in tensors:
        if not isinstance(tensor, OnDevice) and tensor.ndim and id(tensor) not in allowed:
            raise RuntimeError(f"Expected all tensors on the same device: {name}")


def count_copy(source: torch.Tensor, to_device: bool, waits: bool) -> None:
    if isinstance(source, OnDevice) == to_device:
        return
    if to_device and not is_locked(source):
        count("copies from pageable memory")
    if waits:
        count(f"waits for a copy {'from' if to_device else 'to'} the host")


def count_index(name: str, args: tuple) -> None:
    fills = name != "index" and args[2].numel() == 1  # this is masked_fill
    for index in filter(torch.is_tensor, args[1]):
        if index.dtype in (torch.bool, torch.uint8) and not fills:
            count("waits for a boolean index")
        if not isinstance(index, OnDevice):
            count("waits for an index from the host")


# ---- the parts of torch.cuda that are not operators


class Event:
    """An event or a stream: every method returns immediately, and only waits are counted."""

    device = CUDA

    def __init__(self, *args: Any, **options: Any):
        pass

    def synchronize(self) -> None:
        count("waits for synchronize")

    def record(self, *args: Any) -> "Event":
        return self

    record_event = wait = wait_event = wait_stream = record


def register(address: int, size: int, flags: int) -> int:
    """Stand in for cudaHostRegister."""
    LOCKED[address] = address + size
    return 0


def in_fp32(tensor: OnDevice) -> torch.Tensor:
    """Triton's interpreter treats bfloat16 as integers when it multiplies matrices."""
    inner = tensor.inner
    if inner.dtype != torch.bfloat16:
        return inner
    return torch.empty_strided(inner.shape, inner.stride(), dtype=torch.float32).copy_(inner)


class Kernel:
    """A Triton kernel that runs in the interpreter on the numbers of the device's tensors."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable:
        def launch(*args: Any, **constants: Any) -> None:
            if any(isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) for x in args):
                raise RuntimeError("Pointer argument of a kernel is on the cpu")
            inner = [in_fp32(arg) if isinstance(arg, OnDevice) else arg for arg in args]
            with torch.utils._python_dispatch._disable_current_modes():
                self.kernel[grid](*inner, **constants)
            for given, used in zip(args, inner, strict=True):
                if isinstance(given, OnDevice) and used is not given.inner:
                    given.inner.copy_(used)

        return launch


def patch_kernels() -> None:
    """Make every kernel in the folder `kernels` accept the device's tensors."""
    from triton.runtime import interpreter

    for file in sorted((ROOT / "kernels").glob("*.py")):
        module = importlib.import_module(f"kernels.{file.stem}")
        for name, value in list(vars(module).items()):
            if isinstance(value, interpreter.InterpretedFunction) and name.endswith("kernel"):
                setattr(module, name, Kernel(value))
    # The interpreter patches triton.language in every call, half of a kernel's time: do it once.
    languages = {"tl": interpreter.tl, "core": interpreter.tl.core}
    interpreter._patch_lang(types.SimpleNamespace(__globals__=languages))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def patch_torch() -> None:
    """Replace the answers of torch.cuda, and what reaches memory without an operator."""
    cuda = torch.cuda
    answers = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("current_stream", "default_stream"), Event()),
        **dict.fromkeys(("init", "_lazy_init", "set_device", "manual_seed_all"), None),
        **{"device_count": 1, "current_device": 0, "max_memory_allocated": 10**9},
        **{"get_device_name": "NVIDIA H200", "get_device_capability": (9, 0)},
        "mem_get_info": (139 * 10**9, 141 * 10**9),
        "cudart": types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=LOCKED.pop),
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **more: answer)
    cuda.Stream = cuda.Event = Event
    cuda.stream = cuda.device_of = cuda.device = lambda *args: contextlib.nullcontext()
    cuda.synchronize = lambda *args: count("waits for torch.cuda.synchronize")
    torch.Tensor.pin_memory = lambda tensor, *args: lock(tensor.clone())
    torch.Tensor.is_pinned = is_locked

    def made(make: Callable) -> Callable:
        def call(data: Any, *args: Any, device: Any = None, **more: Any) -> torch.Tensor:
            tensor = make(data, *args, **more)
            return tensor if device is None else tensor.to(device)  # a copy that the host waits for

        return call

    torch.tensor, torch.as_tensor = made(torch.tensor), made(torch.as_tensor)
    data = torch._C.TensorBase.data

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        """Support `tensor.data = value` also between host and device."""
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
        with Device():  # every thread has its own modes
            thread_run(self)

    threading.Thread.run = run_with_device


def places(trainer: Any) -> list[tuple]:
    """Return what of each parameter is offloaded, and whether its weights and its optimizer state
    are on the device.
    """
    groups, result = importlib.import_module("offload").parameters_by_part(trainer.model), []
    for part in trainer.offloaded.placement.parts:
        for name, parameter in groups[part.name].items():
            has_weights = parameter.inner.untyped_storage().nbytes() >= parameter.nbytes
            moments = (x for x in trainer.optimizers.state[name].values() if x.ndim)
            has_state = all(isinstance(moment, OnDevice) for moment in moments)
            result.append((part.level if parameter.ndim > 1 else 0, has_weights, has_state))
    return result


def run_command(flags: list[str], command="train", stop=None, patch=None) -> dict[str, Any]:
    """Run a command of this repository; return its status, its output, and the costs of each step.

    In step number `stop` it sends itself a SIGTERM.
    """
    error, said, steps = "", io.StringIO(), []
    trainer = importlib.import_module("train").Trainer
    train_step = trainer.train_step

    def counted(self: Any, step: Any) -> Any:
        if step.after.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        if not steps:
            COUNTS.clear()  # what it took to begin
        done = train_step(self, step)
        where = places(self) if self.offloaded and self.runtime.device.type == "cuda" else []
        steps.append({"costs": dict(COUNTS), "loss": done.loss, "places": where})
        COUNTS.clear()  # what the planner's thread does from now on counts for the next step
        return done

    with contextlib.ExitStack() as around:
        around.enter_context(contextlib.redirect_stdout(said))
        around.enter_context(mock.patch.object(trainer, "train_step", counted))
        for target, source in (patch or {}).items():
            around.enter_context(mock.patch(target, eval(source, globals())))
        try:
            status = importlib.import_module(command).main(flags) or 0
        except Exception:
            status, error = 1, traceback.format_exc()
    return {"status": status, "error": error, "said": said.getvalue(), "steps": steps}


def main() -> None:
    runs = json.load(sys.stdin)
    patch_torch()
    patch_kernels()
    with Device():
        reports = {name: run_command(**run) for name, run in runs.items()}
    Path(sys.argv[2]).write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
