"""Time the project's kernels against their definitions, as a share of the measured peak.

    attention  in packed rows, forward and backward, for documents of real lengths or of 64 tokens:
               plain    torch's causal attention without a mask, as if each row were one document
               dense    the same under a mask of each row's documents: the definition
               groups   kernels/packed_attention.py on a CPU
               triton   the same on a GPU, along with torch's varlen_attn and flex_attention
    loss       cross-entropy of a linear head, forward and backward, in float32 or, on a GPU, under
               autocast to bfloat16; "torch" is torch's F.linear_cross_entropy in chunks (2.13)
    copies     of token dropping around a layer that does nothing, forward and backward

The forms take turns in one process, and a ratio is the median of the ratios within each turn. A
form is timed only if it agrees with the definition: bitwise for copies, otherwise up to the
rounding of its dtype. A form that disagrees, or that this torch lacks, is reported at the end, and
the others continue.

For attention and loss, the peak is the rate of a large matrix product, measured at the start, and
the operations counted are those that every form needs. For copies, the peak is a form too, `copy`:
a plain copy of as many bytes as the operation must move, with each kept or written state read once
and written once. "real" documents are in the first rows of `train.py --pack` on the embedded
corpus; the unused rest of a row counts as a document. "work" is the sum of the squares of the
document lengths, divided by that of the row lengths. "index_ms" is the time to index the documents,
which happens once a step, not once a layer. "gb_moved" counts the passes of a form over its logits.
"memory_gb" is what a form allocates beyond its inputs and gradients, on a CPU in a separate
process.

On a GPU, copies get cold inputs, from sets that together exceed the cache. `ms` is time on the
device; `host_ms` is the time that the host takes to make the calls.

    OMP_NUM_THREADS=2 python bench/operators.py                     # all three
    OMP_NUM_THREADS=2 python bench/operators.py loss --record       # one, and record each case
    python bench/operators.py attention --device cuda --record
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measure import command_line, in_turns, pick, product_rate, quartiles, ratios, recorder, timed
from step import CASES, Variant, steps_of
from torch import Tensor

import config
from kernels import token_drop
from kernels.cross_entropy import IGNORE, linear_cross_entropy
from kernels.packed_attention import bounds, index_of, packed_attention
from kernels.token_drop import merge, reference_gather, reference_scatter, split
from support.process import exit_cleanly, peak_memory


class Shape(NamedTuple):
    """The shape of a batch for one size of model."""

    B: int
    T: int
    H: int
    D: int
    V: int

    @property
    def C(self) -> int:
        return self.H * self.D


SIZES = {"cpu": ("6x128", "12x256", "124M"), "cuda": ("124M", "350M", "1.3B")}
TOKENS = {"cpu": 4096, "cuda": 32_768}  # in a batch; fewer would measure a GPU's host


def shape_of(size: str, device: str) -> Shape:
    model = config.transformer_config(CASES[size].settings("cpu"), CASES[size].vocab_size)
    T = model.seq_len
    tokens = 2 * T if size == "toy" else TOKENS[device]
    H = model.heads
    return Shape(B=tokens // T, T=T, H=H, D=model.width // H, V=model.vocab_size)


class Operation(NamedTuple):
    """An operator on one batch of inputs, in several forms."""

    about: dict[str, object]  # for the record
    forms: dict[str, Callable[[], list[Callable]]]  # name -> makes calls that return tensors
    definition: str
    bitwise: bool = False
    unchecked: tuple[str, ...] = ()  # forms that compute something else
    flops: Callable[[str], float] | None = None  # per call of a form; None: the form `copy` is peak
    more: Callable[[str], dict] = lambda form: {}  # figures of a form besides its times


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def check(found: list[Tensor], expected: list[Tensor], bitwise: bool, dtype: torch.dtype) -> None:
    """Refuse to time a form whose results differ from the definition's."""
    for value, other in zip(found, expected, strict=True):
        error = ((value.double() - other.double()).norm() / other.double().norm()).item()
        if not (value.equal(other) if bitwise else error < 4 * torch.finfo(dtype).eps ** 0.75):
            raise ValueError(f"not timed: the result differs by {error:.1e} of its norm")


def measure(operation: Operation, device: str, turns: int, peak: float) -> dict[str, dict]:
    """Return the figures of each form, or its error."""
    figures: dict[str, dict] = {}
    rounds: dict[str, list[Callable]] = {}
    expected = operation.forms[operation.definition]()[-1]()
    for form, make in operation.forms.items():
        try:
            calls = make()
            if form not in (*operation.unchecked, operation.definition):
                check(calls[-1](), expected, operation.bitwise, dtype_of(device))
        except Exception as error:  # other versions of torch raise other errors
            figures[form] = {"error": str(error).splitlines()[0]}
        else:
            rounds[form] = calls
    taken = in_turns(rounds, turns, partial(timed, device=device))
    ms = {form: [call.ms for call in calls] for form, calls in taken.items()}
    for form, calls in taken.items():
        median = statistics.median(ms[form])
        if operation.flops:
            least_ms = 1e3 * operation.flops(form) / peak
        else:
            least_ms = statistics.median(ms["copy"])
        figures[form] = {
            "ms": quartiles(ms[form]),
            "host_ms": quartiles([call.host_ms for call in calls]),
            "ratio": quartiles(ratios(ms[form], ms[operation.definition])),
            "percent_of_peak": round(100 * least_ms / median, 1),
            **operation.more(form),
        }
    return figures


# ---- attention


ATTENTIONS = {
    "cpu": ("dense", "plain", "groups"),
    "cuda": ("dense", "plain", "triton", "varlen", "flex"),
}
INDEXED = ("dense", "groups", "triton")  # forms that use our index of the documents
BATCHES = 4  # per round


def real_documents(shape: Shape) -> list[Tensor]:
    """Return doc_ids (B, T) of the first batches of a packed run."""
    case = CASES["6x128"]._replace(batch_tokens=shape.B * shape.T)
    settings = Variant(f"--pack --seq-len {shape.T}").settings(case, "cpu")
    batches = [step.batch.doc_ids for step in steps_of(settings, "cpu", BATCHES)]
    return [torch.where(doc_ids < 0, shape.T, doc_ids) for doc_ids in batches]


def pieces_of_64(shape: Shape) -> list[Tensor]:
    return BATCHES * [(torch.arange(shape.T) // 64).repeat(shape.B, 1)]


@cache
def compiled(function: Callable) -> Callable:
    """Compile a function once for all batches, when it is first needed."""
    return torch.compile(function, dynamic=False)


def attention_of(form: str, doc_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return causal attention among these documents, a function of q, k and v (B, T, H, D)."""
    if form in INDEXED:
        documents = index_of(doc_ids, True, form)
        return lambda q, k, v: packed_attention(q, k, v, documents)
    start, end = bounds(doc_ids)
    B, T = doc_ids.shape
    if form == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        first = (start == torch.arange(T, device=start.device)).flatten().nonzero()[:, 0]
        ends = F.pad(first, (0, 1), value=B * T).int()
        longest = int((end - start).max())

        def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = (x.flatten(0, 1) for x in (q, k, v))
            y = varlen_attn(*flat, ends, ends, longest, longest, window_size=(-1, 0))
            return y.view(q.shape)

        return varlen
    attention, options = F.scaled_dot_product_attention, {"is_causal": True}
    if form == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (start[b, q] <= k) & (k <= q)

        mask = create_block_mask(visible, B, None, T, T, device=doc_ids.device)
        attention, options = compiled(flex_attention), {"block_mask": mask}

    def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)

    return heads_first


def attentions(shape: Shape, device: str, turns: int) -> Iterator[Operation]:
    for name, make in {"real": real_documents, "pieces of 64": pieces_of_64}.items():
        yield attention(shape, device, turns, name, [ids.to(device) for ids in make(shape)])


def attention(
    shape: Shape, device: str, turns: int, name: str, documents: list[Tensor]
) -> Operation:
    B, T, H, D, _ = shape
    qkv = torch.randn(B, T, 3, H, D, device=device, dtype=dtype_of(device))
    q, k, v = (x.requires_grad_() for x in qkv.unbind(2))
    d = torch.randn(B, T, H, D, device=device, dtype=dtype_of(device))
    squares = [(end - start).sum().item() for start, end in map(bounds, documents)]
    work = statistics.mean(squares) / (B * T * T)

    def both_ways(function: Callable) -> list[Tensor]:
        out = function(q, k, v)
        return [out, *torch.autograd.grad(out, (q, k, v), d)]

    def calls_of(form: str) -> list[Callable]:
        return [partial(both_ways, attention_of(form, doc_ids)) for doc_ids in documents]

    def flops(form: str) -> float:
        """Count the seven products, forward and backward, for visible scores only."""
        return 3.5 * 2 * B * H * D * T * T * (1 if form == "plain" else work)

    def index_ms(form: str) -> dict:
        if form not in INDEXED:
            return {}
        index = {form: [partial(index_of, documents[0], True, form)]}
        calls = in_turns(index, turns, partial(timed, device=device))[form]
        return {"index_ms": quartiles([max(call) for call in calls])}  # device or host

    return Operation(
        {"kernel": "packed_attention", "documents": name, "work": work},
        {form: partial(calls_of, form) for form in ATTENTIONS[device]},
        definition="dense",
        unchecked=("plain",),
        flops=flops,
        more=index_ms,
    )


# ---- loss


LOSSES = {
    "cpu": ("reference", "chunked", "torch"),
    "cuda": ("reference", "chunked", "triton", "compiled", "torch"),
}
# Bytes moved per logit (there are N V), counted by hand from the code. On a CPU, the reference
# passes over the logits 9 times in float32, the chunked form 11 times. On a GPU, all forms write
# them in bfloat16, and two products read their gradients in bfloat16: 6 bytes. The reference
# converts them to float32 (6), takes logarithms (8), goes back through these (4 + 12) and to
# bfloat16 (6). The chunked form reads or writes them 10 times in float32 and twice more in
# bfloat16. The kernel reads them twice and writes them once. Compiled forms are not counted.
LOGIT_BYTES = {
    "cpu": {"reference": 36, "chunked": 44},
    "cuda": {"reference": 42, "chunked": 50, "triton": 12},
}


def inputs_of_head(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (B T, C) and weight (V, C) that require gradients, and targets (B T,).

    A tenth of the targets is ignored.
    """
    torch.manual_seed(0)
    tokens = shape.B * shape.T
    x = torch.randn(tokens, shape.C, device=device)
    weight = torch.randn(shape.V, shape.C, device=device) / shape.C**0.5
    targets = torch.randint(shape.V, (tokens,), device=device)
    targets[torch.rand(tokens, device=device) < 0.1] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


def loss_both_ways(form: str, x: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    function, impl = linear_cross_entropy, form
    if form == "compiled":
        function, impl = compiled(linear_cross_entropy), "reference"
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        if form == "torch":
            chunks = torch.nn.LinearCrossEntropyOptions()
            how = {"ignore_index": IGNORE, "reduction": "sum", "options": chunks}
            loss = F.linear_cross_entropy(x, weight, targets, **how)
        else:
            loss = function(x, weight, None, targets, impl=impl)
    return [loss, *torch.autograd.grad(loss, (x, weight))]


def peak_bytes(shape: Shape, form: str, device: str) -> int:
    """Return the memory of a call beyond inputs and gradients; on a CPU, accurate to a few MB."""
    small = Shape(B=1, T=8, H=1, D=8, V=8)
    loss_both_ways(form, *inputs_of_head(small, device))  # loads what torch loads lazily
    x, weight, targets = inputs_of_head(shape, device)

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = peak_memory(torch.device(device))
    loss_both_ways(form, x, weight, targets)
    return max(peak_memory(torch.device(device)) - before - x.nbytes - weight.nbytes, 0)


def losses(shape: Shape, device: str, turns: int) -> Iterator[Operation]:
    inputs = inputs_of_head(shape, device)
    tokens = shape.B * shape.T

    def memory(form: str) -> dict:
        if device == "cuda":
            taken = peak_bytes(shape, form, device)
        else:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                taken = pool.apply(peak_bytes, (shape, form, device))
        figures = {"memory_gb": round(taken / 1e9, 3)}
        if form in LOGIT_BYTES[device]:
            matrices = 3 * (tokens + shape.V) * shape.C * inputs[0].element_size()
            moved = LOGIT_BYTES[device][form] * tokens * shape.V + matrices
            figures["gb_moved"] = round(moved / 1e9, 3)
        return figures

    def calls_of(form: str) -> list[Callable]:
        return [partial(loss_both_ways, form, *inputs)]

    yield Operation(
        {"kernel": "cross_entropy"},
        {form: partial(calls_of, form) for form in LOSSES[device]},
        definition="reference",
        flops=lambda form: 6 * tokens * shape.C * shape.V,
        more=memory,
    )


# ---- copies


COLD_BYTES = 256 << 20  # all sets together: five times the 50 MB cache of an H100
MOST_SETS = 32


class Inputs(NamedTuple):
    x: Tensor  # (B, T, C), requires a gradient
    kept: Tensor  # (B, K)
    y: Tensor  # (B, K, C)
    d: Tensor  # (B, T, C), the gradient from above


def inputs_of_copies(shape: Shape, K: int, device: str) -> Inputs:
    B, T, C = shape.B, shape.T, shape.C
    x, y, d = (torch.randn(B, n, C, device=device, dtype=dtype_of(device)) for n in (T, K, T))
    kept = torch.rand(B, T, device=device).topk(K, dim=1).indices.sort(dim=1).values
    return Inputs(x.requires_grad_(), kept, y, d)


def row_numbers(x: Tensor, kept: Tensor) -> Tensor:
    """Return the kept positions (B, K) as row numbers among all B T."""
    B, T, _ = x.shape
    return (kept + T * torch.arange(B, device=x.device)[:, None]).flatten()


def take_rows(x: Tensor, kept: Tensor) -> Tensor:
    return x.flatten(0, 1).index_select(0, row_numbers(x, kept)).view(*kept.shape, -1)


def put_rows(x: Tensor, kept: Tensor, y: Tensor) -> Tensor:
    return x.flatten(0, 1).index_copy(0, row_numbers(x, kept), y.flatten(0, 1)).view(x.shape)


def copying(form: str) -> Callable[[Inputs], list[Tensor]]:
    take, put = reference_gather, reference_scatter
    if form == "compiled":  # separately, because a layer runs between them
        take, put = compiled(take_rows), compiled(put_rows)

    def layer(one: Inputs) -> Tensor:
        if form in ("reference", "compiled"):
            out = put(one.x, one.kept, take(one.x, one.kept))
        else:
            kept_states, rest = split(one.x, one.kept, form)
            out = merge(rest, one.kept, kept_states, form)
        return torch.autograd.grad(out, one.x, one.d)[0]

    return lambda one: [layer(one)]


def copies(shape: Shape, device: str, turns: int) -> Iterator[Operation]:
    for quarters in (1, 2, 3):
        yield copy(shape, device, K=quarters * shape.T // 4)


def copy(shape: Shape, device: str, K: int) -> Operation:
    """Make both copies around a layer that does nothing, forward and backward."""
    one = inputs_of_copies(shape, K, device)
    states = 4 * (K + shape.T)  # per row: 2 K and 2 T forward, and as many backward
    moved = shape.B * states * shape.C * one.x.element_size()
    sets = min(MOST_SETS, 1 + COLD_BYTES // moved) if device == "cuda" else 1
    inputs = [*(inputs_of_copies(shape, K, device) for _ in range(sets - 1)), one]
    target = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    sources = [torch.ones_like(target) for _ in range(sets)]
    forms = ["reference", "torch"]
    if device == "cuda" and token_drop.triton is not None:
        forms += ["triton", "compiled"]

    def calls_of(form: str) -> list[Callable]:
        function = copying(form)
        return [partial(function, each) for each in inputs]

    def plain_copies() -> list[Callable]:
        return [partial(target.copy_, source) for source in sources]

    return Operation(
        {"kernel": "token_drop", "K": K, "operation": "layer", "bytes_moved": moved},
        {form: partial(calls_of, form) for form in forms} | {"copy": plain_copies},
        definition="reference",
        bitwise=True,
        unchecked=("copy",),
    )


OPERATORS = {"attention": attentions, "loss": losses, "copies": copies}


def main() -> None:
    parser = command_line(__doc__, turns=11)
    parser.add_argument("operators", nargs="*", help=f"{', '.join(OPERATORS)} (default: all)")
    parser.add_argument("--size", choices=CASES, nargs="+", help="(default: by --device)")
    args = parser.parse_args()
    chosen = pick(args.operators, OPERATORS)
    peak = product_rate(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    keep = recorder("kernels", args, turns=args.turns, peak_tflops=round(peak / 1e12, 3))
    wrong = []
    for name in chosen:
        for size in args.size or SIZES[args.device]:
            torch.manual_seed(0)
            shape = shape_of(size, args.device)
            for operation in OPERATORS[name](shape, args.device, args.turns):
                if args.device == "cuda":
                    torch.compiler.reset()  # otherwise the ninth shape would run uncompiled
                figures = measure(operation, args.device, args.turns, peak)
                about = {"size": size, **shape._asdict(), "C": shape.C, **operation.about}
                keep(about | {"forms": figures})  # now: a later case may be cut off by a time limit
                wrong += [f"{form}: {f['error']}" for form, f in figures.items() if "error" in f]
    if wrong:
        raise ValueError(f"these forms were not timed: {'; '.join(wrong)}")


if __name__ == "__main__":
    exit_cleanly(main)
