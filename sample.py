"""Print text that a trained GPT writes, as it writes it. One text at a time, no batches.

A text may be longer than a row: when the model's context, `seq_len` tokens, is full, its last half
is kept and grows again (`context_start`).

    python sample.py runs/gpt-nano-1 --prompt "Call me" --tokens 200
    python sample.py runs/gpt-nano-1                  # asks for prompts, until an empty line
    python sample.py runs/gpt-nano-1 < beginning.txt
"""

import codecs
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import tiktoken

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # see train.py

import torch
import torch.nn.functional as F
from torch import Tensor

import config
from model import Block, TokenMeta, Transformer
from support.base import rng, runtime
from support.base.numbers import count
from support.base.sharded import of_rank0
from support.evaluation.scoring import evaluating
from support.run import checkpoint
from support.text.tokenizer import get_encoding, vocab_size
from support.weights.trained import real_weights, running_layers

SMALL = 256  # width up to which a model draws in one thread


def write(
    model: Transformer, encoding: tiktoken.Encoding, prompt: str, most: int, **options: object
) -> Iterator[str]:
    """Yield a text that begins with `prompt`, piece by piece; the options go to `generate`.

    The prompt is taken as the beginning of a document.

    Raises: ValueError if the tokenizer has tokens that the model does not know
    """
    end, start = encoding.eot_token, encoding.encode_ordinary(prompt)
    allowed = vocab_size(encoding, "gpt")
    if allowed > model.config.vocab_size:
        raise ValueError(
            f"tokenizer {encoding.name} has {allowed} tokens, the model {model.config.vocab_size}:"
            " put back the ranks that it was trained with"
        )
    drawn = generate(model, [end, *start], most, allowed=allowed, stop=end, **options)
    return characters(encoding, chain(start, drawn))


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: list[int],
    most: int,
    *,
    allowed: int,
    stop: int | None = None,
    temperature: float = 0.8,
    top_k: int = 50,
    generator: torch.Generator | None = None,
    cached: bool = True,
) -> Iterator[int]:
    """Draw up to `most` tokens after a prompt, one at a time.

    Args:    prompt      at least one token
             allowed     only ids below this are drawn; the others pad the vocabulary
             stop        a token that ends the text, or None
             temperature 0 takes the likeliest token; otherwise logits are divided by it
             top_k       draw among this many likeliest tokens
             generator   on the CPU, where tokens are drawn whatever device the model is on
             cached      keep keys and values; else each token costs a forward pass over its context
    Yields:  the tokens drawn, without `stop`
    Raises:  ValueError for a prompt that is empty or has other ids
    """
    if not prompt or not all(0 <= token < allowed for token in prompt):
        raise ValueError(f"a prompt needs at least one token, all of 0 to {allowed - 1}")
    tokens, cache = list(prompt), KVCache(model) if cached else None
    with evaluating(model):
        for _ in range(most):
            best = next_logits(model, tokens, cache)[:allowed].topk(min(top_k, allowed))
            if temperature == 0:
                drawn = best.indices[0]
            else:
                scores = best.values.cpu().double()
                # less the best one's, so that no temperature is too low
                probabilities = ((scores - scores[0]) / temperature).softmax(0)
                drawn = best.indices[torch.multinomial(probabilities, 1, generator=generator)[0]]
            tokens.append(int(of_rank0(model, drawn)))
            if tokens[-1] == stop:
                break
            yield tokens[-1]


def next_logits(model: Transformer, tokens: list[int], cache: "KVCache | None") -> Tensor:
    """(V,) scores of the token after these; a cache saves the work on tokens it has seen."""
    context = tokens[context_start(len(tokens), model.config.seq_len) :]
    device = model.wte.weight.device
    if cache is None:
        return model.logits(torch.tensor([context], device=device))[0, -1]
    if len(context) <= cache.length:  # the first half was dropped
        cache.length = 0
    return cache.logits(torch.tensor([context[cache.length :]], device=device))[0]


def context_start(tokens: int, seq_len: int) -> int:
    """Where in a text of this many tokens the context of the next one begins.

    It moves rarely and far, because positions count from it: whenever it moves, a cache of keys and
    values has to be made anew. The context is at least half a row, once the text is that long.

    Example: rows of 4 tokens: 0 for up to 4 tokens, 2 for 5 and 6, 4 for 7 and 8
    """
    step = seq_len - seq_len // 2
    return -(-max(0, tokens - seq_len) // step) * step


def characters(encoding: tiktoken.Encoding, tokens: Iterable[int]) -> Iterator[str]:
    """Decode token by token; the bytes of a character wait until it is whole.

    Returns: strings that make up encoding.decode(tokens), with U+FFFD for what is not UTF-8
    """
    return codecs.iterdecode(map(encoding.decode_single_token_bytes, tokens), "utf-8", "replace")


# ---- keys and values


class KVCache:
    """The keys and values of a text so far, so that its next token costs one token's work.

    A causal layer treats a token alike whatever follows it, so keys and values stay right while the
    text grows. The token at position p, the cache's length, needs from each layer

        q, k, v = rotated(c_attn(ln_1(x)))        (B, 1, H, D) each, of this token alone
        keys[p], values[p] = k, v                 (B, H, S, D) for a text of at most S tokens
        y = softmax(q keys[..p] / sqrt(D)) values[..p]

    When the first tokens of a text are dropped the others get new positions and have seen less:
    nothing in the cache is right any more, and the caller sets its length back to 0.

    Only attention differs: `run_block` calls the block as the model's own does, so weights that are
    compiled, offloaded or sharded are where the block wants them.
    """

    def __init__(self, model: Transformer):
        self.model, self.length = model, 0  # of each row, positions 0 to length - 1 are here
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values (B, H, S, D)

    def logits(self, tokens: Tensor) -> Tensor:
        """Take in the tokens that come next.

        Args:    tokens (B, T) int64
        Returns: (B, V) scores of the token after them
        Raises:  ValueError if the text would be longer than a row of the model
        """
        T, seq_len = tokens.shape[1], self.model.config.seq_len
        if self.length + T > seq_len:
            raise ValueError(
                f"a text of {self.length + T} tokens is longer than the model's --seq-len {seq_len}"
            )
        positions = torch.arange(self.length, self.length + T, device=tokens.device)[None]  # (1, T)
        logits = self.model.logits(tokens, positions, run_block=self.run_block)  # (B, 1, V)
        self.length += T
        return logits[:, 0]

    def run_block(self, layer: int, block: Block, x: Tensor, meta: TokenMeta) -> Tensor:
        x = self.model.run_block(layer, block, x, Following(meta, self, layer))
        is_last = layer + 1 == len(self.model.h)
        return x[:, -1:] if is_last else x  # only the last token's prediction is wanted

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values followed by these (B, T, H, D); views, no copies."""
        B, T, H, D = k.shape
        if layer not in self.kept:
            size = (B, H, self.model.config.seq_len, D)
            self.kept[layer] = k.new_empty(size), v.new_empty(size)
        keys, values = self.kept[layer]
        stop = self.length + T
        keys[:, :, self.length : stop] = k.transpose(1, 2)
        values[:, :, self.length : stop] = v.transpose(1, 2)
        return keys[:, :, :stop], values[:, :, :stop]


class Following(TokenMeta):
    """Tokens that also see those in a layer's cache, and are added to it."""

    def __init__(self, meta: TokenMeta, cache: KVCache, layer: int):
        super().__init__(meta.positions, None, meta.causal, meta.rotation)
        self.cache, self.layer = cache, layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        _, T, _, _ = q.shape
        before, sees = self.cache.length, None
        keys, values = self.cache.append(self.layer, k, v)  # (B, KV, before + T, D) each
        if T > 1:  # a single token sees everything
            sees = q.new_ones(T, before + T, dtype=torch.bool).tril(before)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, sees, dropout, enable_gqa=keys.shape[1] < q.shape[2]
        )
        return y.transpose(1, 2)  # (B, T, H, D)


# ---- the command


def load_run(folder: str, which: str) -> tuple[config.Config, Transformer, dict]:
    """Load a run: its settings, its model with the weights of a checkpoint, and that checkpoint.

    Layers that share weights (--pseudo) get a copy each, layers that are not there yet none.

    Args:   which last | best, or the path of a checkpoint
    Raises: ValueError if the folder holds no checkpoint, or a damaged one
    """
    path = checkpoint.find(folder, which)
    state = checkpoint.load(path)
    settings = config.build(state["config"], will_run=False)
    shape = config.transformer_config(settings, **state["model_size"])
    model = Transformer(replace(shape, layers=len(running_layers(state))))
    model.load_state_dict(real_weights(state))
    return settings, model.eval(), state


def use_few_threads(model: Transformer) -> None:
    """Draw a small model's tokens in one thread, if they are drawn on a CPU with a cache.

    One token is too little work to share: threads would wait for each other a few hundred times a
    token, and much longer when another program has their core.
    """
    if model.wte.weight.device.type == "cpu" and model.config.width <= SMALL:
        torch.set_num_threads(1)


def prompts(given: str | None) -> Iterator[str]:
    """The prompt of the command line; without one what is typed, line by line, or all of a pipe.

    A terminal is asked until a line is empty, or its input ends.
    """
    if given is not None:
        yield given
    elif sys.stdin.isatty():
        yield from iter(typed, "")
    else:
        yield sys.stdin.read().removesuffix("\n")


def typed() -> str:
    """A line that is typed; an empty one at the end of the input."""
    try:
        return input("prompt: ")
    except EOFError:
        return ""


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(prog="sample.py", description=__doc__.split(". ")[0])
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a path")
    parser.add_argument(
        "--prompt", help="text to continue (default: ask for it, or read it from a pipe)"
    )
    parser.add_argument("--tokens", type=count, default=200, help="draw at most this many")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-k", type=count, default=50, help="draw among this many")
    parser.add_argument("--samples", type=count, default=1, help="texts to print")
    parser.add_argument("--seed", type=int, default=1, help="decides the draws")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--dtype", default="auto", choices=("auto", *runtime.DTYPES))
    args = parser.parse_args(argv)
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature {args.temperature}: choose 0 or a positive number")
    here = runtime.start(args.device, args.dtype)
    settings, model, _ = load_run(args.run, args.checkpoint)
    if settings.model.model != "gpt":
        raise ValueError(
            f"{args.run} holds a BERT, which does not write text: evaluate.py scores it"
        )
    encoding = get_encoding(settings.data.tokenizer)
    use_few_threads(model.to(here.device))
    for prompt in prompts(args.prompt):
        for number in range(args.samples):
            if number:
                print("-" * 40)
            text = write(
                model,
                encoding,
                prompt,
                args.tokens,
                temperature=args.temperature,
                top_k=args.top_k,
                generator=rng.generator(torch.device("cpu"), args.seed, number),
            )
            try:
                with torch.inference_mode(), here.autocast():
                    for piece in text:  # which may be anything, as the weights may be anybody's
                        if sys.stdout.isatty():
                            piece = runtime.printable(piece, kept="\n\t")
                        print(piece, end="", flush=True)
            finally:  # also after an interrupt
                print(flush=True)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
