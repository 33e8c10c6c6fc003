"""Pretrain a GPT or a BERT: parse, start, data, model, assembly, resume, loop, finish.

    torchrun train.py --curriculum seqlen --ltd --pack            # the three techniques at once
    torchrun --nproc-per-node 8 train.py --size 124M --data DIR   # the same on eight GPUs
    python train.py --resume                                      # go on with the newest run

Everything a step does follows from the settings and the `Clock` before it: which samples, how long,
what is dropped, how far the weights move. So a run that was killed goes on as if it had not been,
and more processes or micro-batches change its speed, not its curve.
"""

import itertools
import json
import math
import os
import signal
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

# Before torch loads OpenMP, whose threads wait spinning for milliseconds. Beside another torch
# program on two cores the slowest of 20 nano steps took 10.6 s like that, and 2.2 s like this.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import tiktoken
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import config
import ltd
import sample
from data import SpecialIds
from evaluate import Evaluation
from model import RunBlock, Transformer, run_plain
from plan import Clock, Plan, Step
from prepare import embedded_store
from support import checkpoint, published
from support.optim import Optimizers, lr_at
from support.rng import generator, seed_of
from support.runtime import Log, Runtime, StopSignal, exit_cleanly, provenance, start
from support.token_store import Store
from support.tokenizer import byte_lengths, get_encoding, vocab_size


class Trainer:
    """The assembled run: model, optimizers, and one optimizer step."""

    def __init__(self, settings: config.Config, vocabulary: int, runtime: Runtime):
        self.settings, self.runtime = settings, runtime
        self.micro_batch_size = config.micro_batch_size(settings, runtime.world_size)
        torch.manual_seed(seed_of(settings.run.seed, "weights"))
        self.model = Transformer(config.transformer_config(settings, vocabulary))
        if settings.model.init:
            for name in published.load_published(self.model, settings.model.init):
                runtime.say(f"--init left out {name}")
        # The order matters: weights before the device they go to, compile before the wrapper that
        # hooks into gradients (the other way round compiles anew for every length), the optimizers
        # last, on what then exists.
        self.model.to(runtime.device)
        if settings.run.compile:
            for block in self.model.h:
                block.compile()
        self.wrapped = self.model
        if runtime.world_size > 1:
            self.wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        o, fp16 = settings.optim, runtime.dtype == torch.float16
        betas = (o.beta1, o.beta2)
        self.optimizers = Optimizers(self.model, o.optimizer, o.weight_decay, betas, fp16)

    def run_block(self, step: Step, rows: slice) -> RunBlock:
        """How this step runs a block on these rows of the rank: whole, or with tokens dropped."""
        if not self.settings.ltd.on:
            return run_plain
        seed, device = self.settings.run.seed, self.runtime.device
        first = self.runtime.rank * len(step.batch.tokens) + rows.start

        def choose(layer: int, x: Tensor, meta) -> Tensor:
            # drawn for all rows of all ranks: who runs a row does not change what it drops
            B, T, _ = x.shape
            random = generator(device, seed, "ltd", step.after.step, layer)
            score = torch.rand(step.rows, T, generator=random, device=device)[first : first + B]
            padding = None if meta.doc_ids is None else meta.doc_ids < 0
            return ltd.draw(step.kept_tokens, score, padding)

        return ltd.token_dropping(step.kept_tokens, self.settings.model.layers, choose)

    def step(self, step: Step) -> tuple[float, float, float]:
        """One optimizer step: mean loss in nats, gradient norm, learning rate.

        The sum of losses is divided by the targets of all ranks, not by counts of micro-batches,
        so that neither ranks nor accumulation weigh in.
        """
        s, runtime = self.settings, self.runtime
        o, (rows, row_len) = s.optim, step.batch.tokens.shape
        micro_batch_size = self.micro_batch_size * (
            s.data.seq_len // row_len
        )  # shorter rows, more at once
        lr = lr_at(
            step.after.consumed_tokens,
            peak=o.lr,
            floor=o.lr * o.min_lr,
            schedule=o.schedule,
            warmup_tokens=o.warmup_tokens,
            budget=o.tokens,
            decay_share=o.decay_share,
        )
        total = torch.zeros((), device=runtime.device)
        for first in range(0, rows, micro_batch_size):
            part = slice(first, first + micro_batch_size)
            if s.model.dropout:
                torch.manual_seed(seed_of(s.run.seed, "dropout", step.after, runtime.rank, first))
            if runtime.world_size > 1:  # DDP sums gradients over ranks once, with the last part
                self.wrapped.require_backward_grad_sync = part.stop >= rows
            batch = step.batch.rows(part).to(runtime.device)
            with runtime.autocast():
                loss = self.wrapped(batch, run_block=self.run_block(step, part))
            scale = runtime.world_size / max(step.targets, 1)  # DDP's mean over ranks made a sum
            self.optimizers.scaler.scale(loss * scale).backward()
            total += loss.detach()
        local = total.item()
        mean = runtime.reduce(total).item() / max(step.targets, 1)
        if not math.isfinite(mean):
            self.refuse(step, "loss", local)
        norm = self.optimizers.clip_gradients(o.grad_clip)
        if not math.isfinite(norm) and runtime.dtype != torch.float16:
            self.refuse(step, "gradient", norm)
        self.optimizers.step(lr)
        return mean, norm, lr

    def refuse(self, step: Step, what: str, value: float) -> None:
        """Stop every rank before the weights move; name the step and the ranks that saw it."""
        values = self.runtime.gather(value)
        ranks = [str(rank) for rank, seen in enumerate(values) if not math.isfinite(seen)]
        raise ValueError(
            f"the {what} is not finite at step {step.after.step} on rank {', '.join(ranks)}:"
            " nothing was saved after the last checkpoint; lower --lr or start from --resume best"
        )


def parse_or_resume(argv: list[str]) -> tuple[config.Config, Path | None]:
    """The settings of the run, and its folder if it exists already and is to go on."""
    given = config.parse(argv)
    if "run.resume" not in given:
        return config.build(given), None
    folder = Path(given["run.out"]) if "run.out" in given else newest_run()
    if not (folder / "config.json").exists():
        raise ValueError(f"--resume: {folder} holds no run; name the folder of one with --out")
    saved = json.loads((folder / "config.json").read_text())["config"]
    return config.build(config.resumed(saved, given)), folder


def newest_run() -> Path:
    runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ValueError("--resume: there is no run in runs/; name the folder of one with --out")
    return runs[-1].parent


def create_run_folder(settings: config.Config) -> str:
    """Make the folder of a new run and write its settings there; refuse one that holds a run."""
    if settings.run.out:
        folder = Path(settings.run.out)
        if (folder / "config.json").exists() or (folder / "log.jsonl").exists():
            raise ValueError(f"--out {folder} holds a run already: name another, or add --resume")
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = unused(f"runs/{settings.model.model}-{settings.model.size}")
    text = json.dumps({"config": config.flat(settings), **provenance()}, indent=2)
    (folder / "config.json").write_text(text)
    return str(folder)


def unused(stem: str) -> Path:
    """Make the first of stem-1, stem-2, ... that no other run has made, not even just now."""
    for number in itertools.count(1):
        folder = Path(f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue


def savings(settings: config.Config, clock: Clock) -> str:
    """One line: what the techniques saved against the plain run over the same text."""
    saved = []
    if settings.ltd.on:
        full = settings.model.layers * clock.positions
        saved.append(
            f"{1 - clock.layer_tokens / full:.1%} of layer-tokens"
            f" ({clock.layer_tokens / 1e6:.1f} M, plain {full / 1e6:.1f} M)"
        )
    if settings.pack.on:
        padding = 1 - clock.real_tokens / clock.positions
        alone = 1 - clock.real_tokens / (clock.pieces * settings.data.seq_len)
        saved.append(f"padding: {padding:.1%} of all positions, {alone:.1%} with one piece a row")
    return "saved: " + ("; ".join(saved) or "nothing, neither --ltd nor --pack is on")


def vocabulary(settings: config.Config, encoding: tiktoken.Encoding) -> int:
    """Rows of the embedding: the tokenizer's ids up to a multiple of 64, or what --init holds."""
    needed = vocab_size(encoding, settings.model.model)
    if not settings.model.init:
        return -(-needed // 64) * 64
    held = published.published_shape(settings.model.init)["vocab_size"]
    if held < needed:
        raise ValueError(
            f"--init {settings.model.init} has {held} tokens, --tokenizer"
            f" {settings.data.tokenizer} needs {needed}: choose the tokenizer it was trained with"
        )
    return held


def main(argv: list[str] | None = None) -> int:
    settings, folder = parse_or_resume(sys.argv[1:] if argv is None else argv)
    s, o = settings, settings.optim
    runtime = start(s.run.device, s.run.dtype)
    config.micro_batch_size(s, runtime.world_size)

    encoding = get_encoding(s.data.tokenizer)
    special_ids = SpecialIds.of(encoding) if s.model.model == "bert" else None
    path = s.data.data or runtime.on_rank0(lambda: str(embedded_store(s.data.tokenizer)))
    store = Store.open(path)
    store.check_tokenizer(encoding)
    plan = Plan(s, store, special_ids, runtime)
    lengths = byte_lengths(encoding)
    evaluation = Evaluation(store, s.data.seq_len, lengths, special_ids, s.run.eval_tokens)
    trainer = Trainer(s, vocabulary(s, encoding), runtime)
    stop = StopSignal()  # from here on; what came before is no loss

    clock, best, log_size, found = Clock(), math.inf, None, None
    if folder is None:
        folder = Path(runtime.on_rank0(lambda: create_run_folder(s)))
    else:
        log_size = 0  # killed before its first checkpoint, a run starts over
        if any(folder.glob("step-*.pt")):
            found = checkpoint.find(folder, s.run.resume)
    if found:
        state = checkpoint.load(found)
        if not isinstance(state["clock"], dict):
            raise ValueError(f"{found} is of an older version of train.py: start a new run")
        trainer.model.load_state_dict(state["model"])
        trainer.optimizers.load_state_dict(state["optimizers"])
        clock, best, log_size = Clock(**state["clock"]), state["best"], state["log_size"]
        if clock.consumed_tokens >= o.tokens:
            runtime.say(f"{folder} is finished: its {o.tokens} tokens are consumed")
            return 0
    log = Log(folder, runtime.is_rank0, s.run.tensorboard, log_size)
    about = {
        "config": config.flat(s),
        "vocab_size": trainer.model.config.vocab_size,
        **provenance(),
    }
    log.write("run", **about, resumed_at=clock.step)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    runtime.say(
        f"{s.model.model} {s.model.size}: {parameters / 1e6:.2f} M parameters, {runtime.why}"
    )
    runtime.say(f"data: {store.train_tokens} training tokens in {store.path}; run: {folder}")
    if found:
        runtime.say(f"resumed from {found} at step {clock.step}")

    def evaluate(on: Evaluation) -> float:
        began = time.perf_counter()
        seen = on.run(trainer.model, runtime, trainer.micro_batch_size)
        ms = (time.perf_counter() - began) * 1e3
        log.write(
            "eval",
            step=clock.step,
            consumed_tokens=clock.consumed_tokens,
            **seen._asdict(),
            ms=round(ms, 1),
        )
        bar.write(f"step {clock.step}: held-out {seen.val_bpb:.4f} bits per byte")
        return seen.val_bpb

    def save(is_best: bool) -> str:
        state = {
            "model": trainer.model.state_dict(),
            "optimizers": trainer.optimizers.state_dict(),
            "step": clock.step,
            "clock": clock._asdict(),
            "best": best,
            "log_size": log.size(),
            **about,
        }
        write = partial(checkpoint.save, folder, state, step=clock.step, keep=s.run.keep)
        return runtime.on_rank0(lambda: str(write(best=is_best)))

    bar = tqdm(
        total=o.tokens,
        initial=clock.consumed_tokens,
        unit="tok",
        unit_scale=True,
        disable=not runtime.is_rank0,
        smoothing=0.05,
        dynamic_ncols=True,
    )
    loader = ThreadPoolExecutor(1)  # the next step's rows are read while this one computes
    upcoming = loader.submit(plan, clock)
    while True:
        began = time.perf_counter()
        step = upcoming.result()
        data_ms = (time.perf_counter() - began) * 1e3
        upcoming = loader.submit(plan, step.after)
        loss, norm, lr = trainer.step(step)
        ms = (time.perf_counter() - began) * 1e3
        before, clock = clock, step.after
        log.write(
            "train",
            step=clock.step,
            consumed_tokens=clock.consumed_tokens,
            real_tokens=clock.real_tokens,
            layer_tokens=clock.layer_tokens,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            seq_len=step.seq_len,
            kept_tokens=step.kept_tokens,
            padding_share=round(step.padding_share, 6),
            **step.stage,
            ms=round(ms, 2),
            data_ms=round(data_ms, 2),
        )
        real = clock.real_tokens - before.real_tokens
        bar.set_postfix_str(f"loss {loss:.3f}, {real / ms * 1e3:.0f} tokens/s", refresh=False)
        bar.update(clock.consumed_tokens - before.consumed_tokens)

        finished = clock.consumed_tokens >= o.tokens
        is_best = False
        if finished or due(s.run.eval_every, before, clock):
            bpb = evaluate(evaluation)
            is_best = bpb < best
            best = min(bpb, best)
        stopping = runtime.reduce(torch.tensor(float(stop.number > 0), device=runtime.device)) > 0
        if finished or stopping or is_best or due(s.run.checkpoint_every, before, clock):
            saved = save(is_best)
        if stopping and not finished:
            bar.close()
            log.close()
            runtime.say(
                f"stopped at step {clock.step}; go on with: train.py --resume --out {folder}"
            )
            return 128 + (stop.number or signal.SIGTERM)
        if finished:
            break
    bar.close()
    loader.shutdown()
    # evaluations on the way took a part, to tell the best checkpoint; the last word takes all
    bpb = evaluate(Evaluation(store, s.data.seq_len, lengths, special_ids))
    log.close()
    runtime.say(f"held-out: {bpb:.4f} bits per byte, full length, nothing dropped")
    runtime.say(savings(s, clock))
    if s.model.model == "gpt" and runtime.is_rank0:
        random = generator(runtime.device, s.run.seed, "sample")
        with torch.compiler.set_stance("force_eager"):  # a row that grows would compile each time
            text = sample.write(trainer.model, encoding, "", 100, generator=random)
        runtime.say(f"a sample:\n{textwrap.indent(text, '    ')}")
    runtime.say(f"checkpoint: {saved}\nlog: {folder / 'log.jsonl'}")
    return 0


def due(every: int, before: Clock, now: Clock) -> bool:
    """Whether the clock went past a multiple of `every` tokens in this step."""
    return before.consumed_tokens // every != now.consumed_tokens // every


if __name__ == "__main__":
    exit_cleanly(main)
