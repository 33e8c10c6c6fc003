"""The drawings of README.md and docs/, made from the code and from records.

    python docs/pictures.py                # draws every docs/*.svg anew

A drawing is a function below that returns an SVG; its name is that of its file. Its colours are
those of a report, light and dark. At WIDTH a phone shows it without shrinking its text.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "bench"))

import numpy as np
import torch
from frontier import SIDES, cost_of, curves_of, envelope, points_in

import ltd
import offload
import pseudo
from curriculum import CurriculumConfig, parse_metrics
from data import cut
from kernels.packed_attention import attention_mask
from model import Transformer, TransformerConfig
from packing import pack_lengths
from report import FRAME, Curve, plot
from support.clock import StepContext, shuffled

DOCS = Path(__file__).resolve().parent
WIDTH = 380  # pixels
STYLE = re.search(r"<style>.*?</style>", FRAME.read_text(), re.DOTALL)[0]  # the first of a report


# ---- parts of a drawing


def svg(parts: list[str], height: float, width: float = WIDTH) -> str:
    """A whole file."""
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}"'
    )
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join([f"{begin}>", STYLE, paper, *parts, "</svg>\n"])


def text(x: float, y: float, content: str, look: str = "") -> str:
    """`look`: x to be centred at x, y to end there; title; a colour is of a <tspan>."""
    return f'<text class="{look}" x="{x:g}" y="{y:g}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, color: int | str = "grid") -> str:
    """Filled with one of the colours 0 to 5 of a report; "grid" is as faint as a grid line."""
    fill = 'fill="#8884"' if color == "grid" else f'class="c{color}" fill="currentColor"'
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f"<rect {fill} {place}/>"


def line(x1: float, y1: float, x2: float, y2: float, look: str = "base") -> str:
    return f'<line class="{look}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def group(parts: list[str], x: float, y: float) -> list[str]:
    """The same parts, moved."""
    return [f'<g transform="translate({x:g} {y:g})">', *parts, "</g>"]


def legend(names: list[str], y: float) -> list[str]:
    """A line for each name, with the colours of a report in their order."""
    spots = [(name, color, y + 17 * color) for color, name in enumerate(names)]
    return [part for n, c, at in spots for part in (box(12, at - 6, 16, 4, c), text(34, at, n))]


# ---- the drawings


def frontier() -> str:
    """Loss against seconds in rows of 2,048: the best plain models, and runs with techniques."""
    ticks = [(float(np.log10(s)), f"{s:,}") for s in (50, 100, 200, 400, 800)]
    x_unit = "seconds of the run, on two CPU cores (log scale)"
    drawn = plot(curves_of("books", "cpu"), x_unit, x_ticks=ticks, size=(WIDTH, 300))
    head = text(12, 22, "Held-out bits per byte, rows of 2,048", "title")
    sides = ["plain models of any depth, width and batch", "with techniques"]
    notes = (
        "Dots: the mean over seeds; bars: their range.",
        "Lines join the best runs.",
    )
    words = [text(12, 82 + 17 * n, note) for n, note in enumerate(notes)]
    return svg([head, *legend(sides, 44), *words, *group([drawn], 0, 106)], 412)


def paces() -> str:
    """How much of a row of 2,048, or of the ranked samples, a curriculum allows by now."""
    levels = "discrete:128@0.5:512@0.85:2048"
    shown = {
        "seqlen with --pack: length of a piece, of 2,048": (CurriculumConfig("seqlen"), True),
        f"the same with {levels}": (CurriculumConfig("seqlen", pace=levels), True),
        "seqlen without --pack: length of a row, of 2,048": (CurriculumConfig("seqlen"), False),
        "rarity: samples that may be drawn, of all": (CurriculumConfig("rarity"), True),
    }
    x, curves = np.linspace(0, 1, 401), []
    for color, (name, (flags, packed)) in enumerate(shown.items()):
        (pacing,) = parse_metrics(flags, 2048, packed).values()
        y = np.array([100 * pacing.at(t) / pacing.at(1) for t in x])
        curves.append(Curve(name, x, y, color))
    drawn = plot(curves, "share of the run's --tokens", from_zero=True, size=(WIDTH, 240))
    head = text(12, 22, "What a curriculum allows, in %", "title")
    return svg([head, *legend([*shown], 44), *group([drawn], 0, 100)], 340)


def gain() -> str:
    """What rows of 2,048 gain: all runs whose packed pieces grow, against the plain frontier."""
    sections = {
        "books": "the embedded corpus, mostly books",
        "long": "the Linux kernel's documentation, tied head",
        "kernel": "the same, head not tied",
        "rfcs": "sections of RFCs",
    }
    ticks = [(float(np.log10(s)), f"{s:,}") for s in (40, 100, 200, 400, 800)]
    ends = np.array([ticks[0][0], 3.0])  # 1,000 seconds
    curves = [Curve("plain", ends, np.ones(2), kind="level")]
    for color, section in enumerate(sections):
        points = points_in(section, "cpu")
        plain = envelope([p for p in points if p.plain])
        for p in points:
            if re.search("^(?!.*(--ltd|,rarity)).*--pack --curriculum seqlen", p.flags):
                share = p.cost / cost_of(max(p.loss, plain[-1].loss), plain)
                x, below = np.log10([p.cost, p.cost]), 0.04 * (p.loss < plain[-1].loss)
                curves.append(Curve(p.flags, x[:1], np.array([share]), color))
                curves.append(Curve(p.flags, x, np.array([share, share - below]), color))
    x_unit = "seconds of the run, on two CPU cores"
    drawn = plot(curves, x_unit, x_ticks=ticks, size=(WIDTH, 260))
    head = text(12, 22, "Share of the best plain model's seconds", "title")
    note = text(12, 40, "to the same loss (with a tail: at most that)")
    return svg([head, note, *legend([*sections.values()], 60), *group([drawn], 0, 112)], 372)


def mask() -> str:
    """Who sees whom in a row of three documents and a token of padding."""
    doc_ids, side, parts = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, -1]]), 16, []
    for number, name in enumerate(("A GPT's", "A BERT's")):
        allowed = attention_mask(doc_ids, causal=number == 0)[0, 0].tolist()
        cells = [text(0, -8, name, "title")]
        for row, document in enumerate(doc_ids[0].tolist()):
            colors = ["grid", "grid"], [4 if document < 0 else document] * 2
            cells += [
                box(side * column, side * row, side - 2, side - 2, colors[seen][0])
                for column, seen in enumerate(allowed[row])
            ]
        parts += group(cells, 70 + 162 * number, 40)
    names = [("doc 0", 1), ("doc 1", 3.5), ("doc 2", 6), ("padding", 8)]
    parts += [text(12, 40 + side * (at + 0.7), name) for name, at in names]
    return svg([*parts, text(70, 204, "a line for each query, a column for each key")], 216)


def packs() -> str:
    """Six documents in rows of ten tokens, by three packers."""
    lengths, max_len, unit, parts = [7, 6, 5, 5, 4, 3], 10, 11.4, []
    packers = {"one a row": ("lpfhp", 1), "spfhp": ("spfhp", None), "lpfhp": ("lpfhp", None)}
    for number, (name, (packer, most)) in enumerate(packers.items()):
        packed = pack_lengths(lengths, max_len, packer, most)
        rows = np.split(packed.items, packed.offsets[1:-1])
        full = sum(lengths) / (max_len * len(rows))
        column = [text(0, 0, name, "title"), text(0, 18, f"{len(rows)} rows, {full:.0%} full")]
        for y, row in enumerate(rows):
            column.append(box(0, 28 + 24 * y, unit * max_len, 20))
            ends = np.cumsum([lengths[i] for i in row])
            for i, end in zip(row, ends.tolist(), strict=True):
                x, width = unit * (end - lengths[i]), unit * lengths[i] - 1
                column.append(box(x, 28 + 24 * y, width, 20, 0))
                column.append(text(x + width / 2, 42 + 24 * y, str(lengths[i]), "x paper"))
        parts += group(column, 12 + 122 * number, 22)
    return svg(parts, 200)


TEXTS = {  # sections of bench/frontier.ini
    "nano": "Books, rows of 256",
    "books": "Books, rows of 2,048",
    "english": "English, rows of 256",
    "rfcs": "RFCs, rows of 2,048",
    "kernel": "Linux, rows of 2,048",
}


def texts() -> str:
    """Both frontiers on every text."""
    parts = [text(208, 390, "Bits per byte, the best"), text(208, 408, "runs of each side:")]
    for number, (section, title) in enumerate(TEXTS.items()):
        curves = [curve for curve in curves_of(section, "cpu") if curve.label in SIDES]
        last = max(curve.x.max() for curve in curves)
        ticks = [(np.log10(s), f"{s}") for s in (30, 100, 300, 900) if np.log10(s) <= last]
        plotted = plot(curves, "seconds", x_ticks=ticks, size=(WIDTH // 2, 150))
        panel = [text(12, 16, title), *group([plotted], 0, 16)]
        parts += group(panel, number % 2 * WIDTH / 2, number // 2 * 176)
    return svg([*parts, *group(legend([*SIDES], 430), 196, 0)], 524)


def stages() -> str:
    """Whose weights six layers use, stage by stage."""
    parts = []
    for number, flags in enumerate(({"group": 1, "until": "0.05,0.1"}, {"layers": 3})):
        config = pseudo.resolved(pseudo.PseudoConfig(**flags), 6, None)
        title = " ".join(f"--pseudo-{name} {value}" for name, value in flags.items())
        rows = [text(12, 14, title, "title")]
        for column, start in enumerate((0, *pseudo.parse_until(config.until))):
            x = 12 + 122 * column
            rows.append(text(x, 146, f"from {start:g}"))
            for layer, owner in enumerate(pseudo.owners_at(config, 6, start)):
                color, name = (owner, f"h.{owner}") if owner >= 0 else ("grid", "absent")
                rows.append(box(x, 26 + 18 * layer, 52, 12, color))
                rows.append(text(x + 58, 36 + 18 * layer, name))
        parts += group(rows, 0, 8 + 170 * number)
    return svg(parts, 336)


def timeline() -> str:
    """A micro-batch with offload, the example of offload.py's head.

    All its work is done here, and drawn in the order in which it was begun. A block's forward pass
    takes a unit of time, and so does copying its weights or gradients.
    """
    model = Transformer(TransformerConfig(6, 4, 128, 512, 256, 4160, "rope"))
    parts = offload.parts_of(model, muon=True, dtype=torch.float32)
    offloaded = offload.Offload(offload.place(parts, 19_000_000), model, torch.device("cpu"))
    weights = {m.weight.data_ptr(): m.part.layers[0] for m in offloaded.matrices}
    free, work, backward = Counter(), [], []  # when a lane is; what it did; layers to go back

    def note(lane, length, layer):
        begin = max(free[lane], free["compute"])
        work.append((lane, begin, length, layer))
        free[lane] = begin + length

    def copy(_, pairs):
        for target, source in pairs:  # of one block
            target.copy_(source)
        if source.data_ptr() in weights:
            note("copy up", 1, weights[source.data_ptr()])
        elif backward:  # the first gradient that this block's backward pass has made
            note("compute", 2, backward[-1])
            note("copy down", 1, backward.pop())

    def wait(_):
        free["compute"] = max(free["compute"], free["copy up"])

    offloaded.link.copy, offloaded.link.wait = copy, wait
    for layer, block in enumerate(model.h):
        block.register_forward_pre_hook(lambda *_, layer=layer: note("compute", 1, layer))
        block.register_full_backward_pre_hook(lambda *_, layer=layer: backward.append(layer))
    for _ in range(2):  # the second time as in the middle of a step
        work.clear()
        loss = model(torch.zeros(1, 2, dtype=torch.int64)).sum()
        with offloaded.around_backward(is_last=False):
            loss.backward()
    lanes, begin = ("compute", "copy up", "copy down"), work[0][1]
    scale = (WIDTH - 24) / (max(free.values()) - begin)
    parts = [text(12, 16 + 40 * n, lane) for n, lane in enumerate(lanes)]
    for lane, start, length, layer in work:
        y = 22 + 40 * lanes.index(lane)
        parts.append(box(12 + scale * (start - begin), y, scale * length, 14, layer))
    return svg([*parts, *legend([f"h.{layer}" for layer in range(6)], 150)], 250)


def dropped() -> str:
    """Which tokens of one row six layers see in one step, if the middle ones keep 6 of 24."""
    context = StepContext(seed=1337, step=1, progress=0.0, seq_len=24, layers=6)
    drawn = ltd.draw_kept(6, context.bits("ltd", range(1, 5), torch.tensor([0]), 24))  # (4, 1, 6)
    seen_by = [range(24), *drawn[:, 0].tolist(), range(24)]
    parts = [text(12, 22, "Which tokens each layer sees in one step", "title")]
    for layer, seen in enumerate(seen_by):
        y = 40 + 22 * (5 - layer)
        parts.append(text(58, y + 12, f"layer {layer}", "y"))
        parts += [box(66 + 12.5 * t, y, 10.5, 16, 0 if t in seen else "grid") for t in range(24)]
    return svg([*parts, text(66, 188, "token 0"), text(366, 188, "token 23", "y")], 200)


def given() -> str:
    """A given model of eight layers with all tokens or a part of them, and two plain layers."""
    points, curves = points_in("given", "cpu"), []
    shown = {
        "8 layers, all tokens": r"^--layers 8 --tokens \S+$",
        "8 layers, 1/2 kept": r"^--layers 8 --tokens \S+ --ltd --ltd-start 256$",
        "8 layers, 1/4": r"^--layers 8 --tokens \S+ --ltd --ltd-start 128$",
        "8 layers, 1/16": r"^--layers 8 --tokens \S+ --ltd$",
        "2 layers, all tokens": r"^--layers 2 --tokens \S+$",
    }
    for color, (name, pattern) in enumerate(shown.items()):
        some = [p for p in points if re.search(pattern, p.flags)]
        x, y = np.log10([p.cost for p in some]), np.array([p.loss for p in some])
        curves.append(Curve(name, x, y, color, "dots"))
    ticks = [(float(np.log10(s)), f"{s}") for s in (70, 100, 150, 200, 300)]
    x_unit = "seconds of the run, on two CPU cores"
    drawn = plot(curves, x_unit, x_ticks=ticks, size=(WIDTH, 240))
    head = text(12, 22, "Held-out bits per byte, rows of 512", "title")
    return svg([head, *legend([*shown], 44), *group([drawn], 0, 118)], 360)


def clock() -> str:
    """How the clock advances with the text that is read, in six layers and rows of 256."""
    runs: dict[str, Callable] = {
        "plain": lambda context, tokens: tokens,
        "--ltd --ltd-start 64: four layers keep a quarter": partial(
            ltd.tokens_by_layer, ltd.resolved(ltd.LtdConfig(True, start=64), 256, 6)
        ),
        "--pseudo --pseudo-layers 3: three layers until 0.75": partial(
            pseudo.tokens_by_layer, pseudo.resolved(pseudo.PseudoConfig(True, layers=3), 6, None)
        ),
    }
    curves = []
    for color, (name, tokens_by_layer) in enumerate(runs.items()):
        read, consumed = [0.0], [0.0]
        while consumed[-1] < 1:
            context = StepContext(1, 1, consumed[-1], seq_len=256, layers=6)
            tokens = tokens_by_layer(context, [256] * 6)
            read.append(read[-1] + 0.001)
            consumed.append(consumed[-1] + 0.001 * sum(tokens) / (6 * 256))
        curves.append(Curve(name, np.array(read), np.array(consumed), color))
    x_unit = "tokens of text read, in multiples of --tokens"
    drawn = plot(curves, x_unit, from_zero=True, size=(WIDTH, 240))
    head = text(12, 22, "Share of --tokens that is consumed", "title")
    return svg([head, *legend([*runs], 44), *group([drawn], 0, 84)], 324)


def flow() -> str:
    """Three documents on their way into a step of two rows of 8 tokens."""
    documents = ["parsimony.", "is.", "less."]
    letters, color = "".join(documents), np.repeat(range(3), [*map(len, documents)])
    ends = np.cumsum([0, *map(len, documents)])
    samples = cut(np.stack((ends[:-1], ends[1:]), axis=1), 8)  # (4, 2)
    drawn = samples[shuffled(np.arange(4), 4, seed=1337)]
    pieces = cut(drawn, 4)
    packs = pack_lengths(pieces[:, 1] - pieces[:, 0], 8)
    rows = [pieces[row] for row in np.split(packs.items, packs.offsets[1:-1])]
    context = StepContext(seed=1337, step=1, progress=0.0, seq_len=8, layers=4)
    kept = ltd.draw_kept(3, context.bits("ltd", [1, 2], torch.tensor([0]), 8))[:, 0].tolist()

    def cells(spans: np.ndarray, x: float, y: float, gap: float, seen: Sequence[int]) -> list[str]:
        parts, token = [], 0
        for start, end in spans.tolist():
            for i in range(start, end):
                parts.append(box(x, y, 13, 18, int(color[i]) if token in seen else "grid"))
                parts.append(text(x + 6.5, y + 13, letters[i], "x on" if token in seen else "x"))
                x, token = x + 14, token + 1
            x += gap
        return parts

    whole, dark = range(99), "@media (prefers-color-scheme: dark) { svg .on { fill: #15171a; } }"
    parts = [f"<style>svg .on {{ fill: #fff; }}\n{dark}</style>"]
    for y, words in (
        (22, "1  A store: documents, one after the other (prepare.py)"),
        (76, "2  Samples that fit a row of 8, shuffled (plan.py)"),
        (130, "3  Curriculum: cut to at most 4, at this stage (curriculum.py)"),
        (184, "4  Packing: rows of 8, as full as possible (packing.py)"),
        (238, "5  Dropping: middle layers see a random 3 of a row (ltd.py)"),
        (352, "6  The loss on every token moves the weights. The clock"),
        (369, "    says what the next step may read (train.py)"),
    ):
        parts.append(text(12, y, words))
    strips = ((np.stack((ends[:-1], ends[1:]), axis=1), 30), (drawn, 84), (pieces, 138))
    for spans, y in strips:
        parts += cells(spans, 12, y, 6, whole)
    for number, row in enumerate(rows):
        parts += cells(row, 12 + 124 * number, 192, 0, whole)
    for layer, seen in enumerate([whole, *kept, whole]):
        parts += cells(rows[0], 12, 312 - 22 * layer, 0, seen)
        parts.append(text(134, 326 - 22 * layer, f"layer {layer}"))
    return svg(parts, 382)


OF_RECORDS = (frontier, gain, given, texts)
OF_CODE = (clock, dropped, flow, mask, packs, paces, stages, timeline)
PICTURES = {draw.__name__: draw for draw in (*OF_RECORDS, *OF_CODE)}

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        (DOCS / f"{name}.svg").write_text(drawn(), encoding="utf-8")
