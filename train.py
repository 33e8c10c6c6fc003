"""Pretrain a GPT or a BERT: parse, runtime, data, plan, model, assembly, resume, loop, finish.

    torchrun train.py --curriculum seqlen --ltd --pack            # the three techniques at once
    torchrun --nproc-per-node 8 train.py --size 124M --data DIR   # the same on eight GPUs
    python train.py --resume                                      # go on with the newest run

Everything a step does follows from the settings and the `Clock` before it: which samples, how long,
what is dropped, how far the weights move. So a run that was killed goes on as if it had not been,
and more processes or micro-batches change its speed, not its curve.
"""

import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

# Before torch loads OpenMP, whose threads wait spinning for milliseconds. Beside another torch
# program on two cores the slowest of 20 nano steps took 10.6 s like that, and 2.2 s like this.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import tiktoken
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import config
import sample
from data import SpecialIds
from evaluate import Evaluation
from model import RunBlock, Transformer, run_plain
from plan import Plan, Step
from prepare import embedded_store
from support import published
from support.clock import Clock, savings
from support.optim import Optimizers, lr_at
from support.progress import announce, progress_bar, show_step
from support.rng import generator, seed_of
from support.run_folder import Run
from support.runtime import Runtime, exit_cleanly, start
from support.settings import techniques_on
from support.stop_signal import StopSignal
from support.token_store import Store
from support.tokenizer import byte_lengths, get_encoding, vocab_size


def main(argv: list[str] | None = None) -> int:
    settings, folder = config.parse_or_resume(sys.argv[1:] if argv is None else argv)
    s = settings
    runtime = start(s.run.device, s.run.dtype)
    micro_batch_size(s, runtime.world_size)  # refused before anything is read
    data = open_data(s, runtime)
    plan = Plan(s, data.store, data.special_ids, runtime)
    evaluation = data.evaluation(s.data.seq_len, s.run.eval_tokens)
    model = new_model(s, data.encoding, runtime)
    trainer = assemble(s, model, runtime)
    stop = StopSignal()  # from here on; what came before is no loss
    run = Run(s, runtime, folder, model, trainer.optimizers)
    if run.is_finished:
        runtime.say(f"{run.folder} is finished: its {s.optim.tokens} tokens are consumed")
        return 0
    run.open_log()
    announce(run, data.store)
    bar = progress_bar(run)

    saved, noted = "", ""
    for step, waited_ms in read_ahead(plan, run.clock):
        began = time.perf_counter()
        done = trainer.step(step)
        ms = (time.perf_counter() - began) * 1e3 + waited_ms
        before, run.clock = run.clock, step.after
        write_step(run, step, done, ms, waited_ms)
        show_step(bar, before, run.clock, done, ms)
        if step.note and not noted:
            noted = step.note
            bar.write(f"--curriculum: {noted}; from here on the log says how far")
        is_best = False
        if run.is_finished or due(s.run.eval_every, before, run.clock):
            bits_per_byte = evaluate(run, trainer, evaluation, bar)
            is_best = bits_per_byte < run.best
            run.best = min(bits_per_byte, run.best)
        stopping = runtime.reduce(torch.tensor(float(stop.number > 0), device=runtime.device)) > 0
        if run.is_finished or stopping or is_best or due(s.run.checkpoint_every, before, run.clock):
            saved = run.save(is_best)
        if run.is_finished:
            break
        if stopping:
            bar.close()
            run.log.close()
            again = f"train.py --resume --out {run.folder}"
            runtime.say(f"stopped at step {run.clock.step}; go on with: {again}")
            return 128 + (stop.number or signal.SIGTERM)
    bar.close()
    finish(run, trainer, data, saved)
    return 0


class Data(NamedTuple):
    """What a run reads, and what its token ids mean."""

    encoding: tiktoken.Encoding
    store: Store
    special_ids: SpecialIds | None  # a BERT's
    byte_lengths: np.ndarray  # (V,) of the text that each token stands for

    def evaluation(self, seq_len: int, tokens: int | None = None) -> Evaluation:
        return Evaluation(self.store, seq_len, self.byte_lengths, self.special_ids, tokens)


def open_data(settings: config.Config, runtime: Runtime) -> Data:
    s = settings
    encoding = get_encoding(s.data.tokenizer)
    path = s.data.data or runtime.on_rank0(lambda: str(embedded_store(s.data.tokenizer)))
    store = Store.open(path)
    store.check_tokenizer(encoding)
    special_ids = SpecialIds.of(encoding) if s.model.model == "bert" else None
    return Data(encoding, store, special_ids, byte_lengths(encoding))


def new_model(
    settings: config.Config, encoding: tiktoken.Encoding, runtime: Runtime
) -> Transformer:
    """A model with the weights that every run with this seed starts from, or those of --init."""
    m = settings.model
    rows = vocab_size(encoding, m.model)  # of the embedding
    if m.init:
        held = published.published_shape(m.init)["vocab_size"]
        if held < rows:
            raise ValueError(
                f"--init {m.init} has {held} tokens, --tokenizer {settings.data.tokenizer} needs"
                f" {rows}: choose the tokenizer it was trained with"
            )
        rows = held
    else:
        rows = -(-rows // 64) * 64  # matrix units work in tiles
    torch.manual_seed(seed_of(settings.run.seed, "weights"))
    model = Transformer(config.transformer_config(settings, rows))
    if m.init:
        for name in published.load_published(model, m.init):
            runtime.say(f"--init left out {name}")
    return model


def assemble(settings: config.Config, model: Transformer, runtime: Runtime) -> "Trainer":
    """Put a model together with all that acts on it. The order matters, line by line.

    Called once more, on the same model, when a technique has changed its parameters in mid-run.
    """
    s = settings
    # to its device first, for all that follows holds on to the parameters that are there then
    model.to(runtime.device)
    # compile before the wrapper: with its hooks inside, every new length would compile again
    if s.run.compile:
        for block in model.h:
            block.compile()
    # the wrapper before the optimizers: it hooks into gradients and may regroup them
    wrapped: nn.Module = model
    if runtime.world_size > 1:
        unused = any(technique.skips_layers for technique in techniques_on(s))
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=unused
        )
    # the optimizers last, on the parameters that then exist
    betas, fp16 = (s.optim.beta1, s.optim.beta2), runtime.dtype == torch.float16
    optimizers = Optimizers(model, s.optim.optimizer, s.optim.weight_decay, betas, fp16)
    return Trainer(s, runtime, model, wrapped, optimizers)


class Done(NamedTuple):
    """What a step found: mean loss in nats, norm of the gradient, learning rate."""

    loss: float
    grad_norm: float
    lr: float


class Trainer:
    """An assembled model, and one optimizer step."""

    def __init__(
        self,
        settings: config.Config,
        runtime: Runtime,
        model: Transformer,
        wrapped: nn.Module,
        optimizers: Optimizers,
    ):
        self.settings, self.runtime = settings, runtime
        self.model, self.wrapped, self.optimizers = model, wrapped, optimizers
        self.micro_batch_size = micro_batch_size(settings, runtime.world_size)

    def step(self, step: Step) -> Done:
        """Forward and backward over this rank's rows, part by part; clip; move the weights.

        The sum of losses is divided by the targets of all ranks, not by counts of micro-batches,
        so that neither ranks nor accumulation weigh in.
        """
        s, runtime = self.settings, self.runtime
        rows, seq_len = step.batch.tokens.shape
        at_once = self.micro_batch_size * (s.data.seq_len // seq_len)  # shorter rows, more of them
        total = torch.zeros((), device=runtime.device)
        for first in range(0, rows, at_once):
            part = slice(first, first + at_once)
            if s.model.dropout:
                key = (s.run.seed, "dropout", step.context.step, runtime.rank, first)
                torch.manual_seed(seed_of(*key))
            if runtime.world_size > 1:  # DDP sums gradients over ranks once, with the last part
                self.wrapped.require_backward_grad_sync = part.stop >= rows
            batch = step.batch.rows(part).to(runtime.device)
            with runtime.autocast():
                loss = self.wrapped(batch, run_block=self.run_block(step, first))
            scale = runtime.world_size / max(step.targets, 1)  # DDP's mean over ranks made a sum
            self.optimizers.scaler.scale(loss * scale).backward()
            total += loss.detach()
        local = total.item()
        mean = runtime.reduce(total).item() / max(step.targets, 1)
        if not math.isfinite(mean):
            self.refuse(step, "loss", local)
        norm = self.optimizers.clip_gradients(s.optim.grad_clip)
        if not math.isfinite(norm) and runtime.dtype != torch.float16:
            self.refuse(step, "gradient", norm)
        lr = self.learning_rate(step)
        self.optimizers.step(lr)
        return Done(loss=mean, grad_norm=norm, lr=lr)

    def run_block(self, step: Step, first: int) -> RunBlock:
        """How this step runs a block on the rows of this rank from `first` on.

        Each technique wraps those before it, in the order of `Config`.
        """
        run_block = run_plain
        first_row = self.runtime.rank * len(step.batch.tokens) + first
        for technique in techniques_on(self.settings):
            if technique.run_block:
                run_block = technique.run_block(self.settings, step.context, first_row, run_block)
        return run_block

    def learning_rate(self, step: Step) -> float:
        o = self.settings.optim
        return lr_at(
            step.after.consumed_tokens,
            peak=o.lr,
            floor=o.lr * o.min_lr,
            schedule=o.schedule,
            warmup_tokens=o.warmup_tokens,
            budget=o.tokens,
            decay_share=o.decay_share,
        )

    def refuse(self, step: Step, what: str, value: float) -> None:
        """Stop every rank before the weights move; name the step and the ranks that saw it."""
        values = self.runtime.gather(value)
        ranks = [str(rank) for rank, seen in enumerate(values) if not math.isfinite(seen)]
        raise ValueError(
            f"the {what} is not finite at step {step.context.step} on rank {', '.join(ranks)}:"
            " nothing was saved after the last checkpoint; lower --lr or start from --resume best"
        )


def micro_batch_size(settings: config.Config, world_size: int) -> int:
    """Rows that a rank takes through the model at once, such that accumulation comes out even.

    Raises: ValueError if the rows of --batch-tokens cannot be shared out so
    """
    seq_len, asked = settings.data.seq_len, settings.optim.micro_batch_size
    rows = settings.optim.batch_tokens // seq_len
    share = rows // world_size
    most = asked or max(1, min(share, 32_768 // seq_len))
    if asked is None:
        most = next((m for m in range(most, 0, -1) if share and share % m == 0), most)
    if rows % (most * world_size):
        raise ValueError(
            f"--batch-tokens {settings.optim.batch_tokens} makes {rows} rows of {seq_len} that"
            f" {world_size} ranks of --micro-batch-size {most} cannot share: choose a multiple of"
            f" {most * world_size * seq_len}"
        )
    return most


def read_ahead(plan: Plan, clock: Clock) -> Iterator[tuple[Step, float]]:
    """The steps from this clock on, and the milliseconds each was waited for.

    A thread plans the next one and reads its rows while this one computes.
    """
    with ThreadPoolExecutor(1) as loader:
        upcoming = loader.submit(plan, clock)
        while True:
            began = time.perf_counter()
            step = upcoming.result()
            waited_ms = (time.perf_counter() - began) * 1e3
            upcoming = loader.submit(plan, step.after)
            yield step, waited_ms


def write_step(run: Run, step: Step, done: Done, ms: float, data_ms: float) -> None:
    run.log.write(
        "train",
        step=run.clock.step,
        consumed_tokens=run.clock.consumed_tokens,
        real_tokens=run.clock.real_tokens,
        layer_tokens=run.clock.layer_tokens,
        **done._asdict(),
        max_piece_len=step.max_piece_len,
        kept_tokens=step.kept_tokens,
        padding_share=round(step.padding_share, 6),
        **step.stage,
        ms=round(ms, 2),
        data_ms=round(data_ms, 2),
    )


def evaluate(run: Run, trainer: Trainer, evaluation: Evaluation, bar: tqdm) -> float:
    """Held-out bits per byte of the model as it is now; a line of the log."""
    began = time.perf_counter()
    held_out = evaluation.run(trainer.model, run.runtime, trainer.micro_batch_size)
    ms = (time.perf_counter() - began) * 1e3
    run.log.write(
        "eval",
        step=run.clock.step,
        consumed_tokens=run.clock.consumed_tokens,
        **held_out._asdict(),
        ms=round(ms, 1),
    )
    bar.write(f"step {run.clock.step}: held-out {held_out.val_bpb:.4f} bits per byte")
    return held_out.val_bpb


def finish(run: Run, trainer: Trainer, data: Data, saved: str) -> None:
    """The last word: all of the held-out text, what was saved, and a sample."""
    s, runtime = run.settings, run.runtime
    # evaluations on the way took a part, to tell the best checkpoint
    bits_per_byte = evaluate(run, trainer, data.evaluation(s.data.seq_len), tqdm)
    run.log.close()
    runtime.say(f"held-out: {bits_per_byte:.4f} bits per byte, full length, nothing dropped")
    runtime.say(savings(s, run.clock))
    if s.model.model == "gpt" and runtime.is_rank0:
        random = generator(runtime.device, s.run.seed, "sample")
        with torch.compiler.set_stance("force_eager"):  # a row that grows would compile each time
            text = sample.write(run.model, data.encoding, "", 100, generator=random)
        runtime.say(f"a sample:\n{textwrap.indent(text, '    ')}")
    runtime.say(f"checkpoint: {saved}\nlog: {run.folder / 'log.jsonl'}")


def due(every: int, before: Clock, now: Clock) -> bool:
    """Whether the clock went past a multiple of `every` tokens in this step."""
    return before.consumed_tokens // every != now.consumed_tokens // every


if __name__ == "__main__":
    exit_cleanly(main)
