"""Generate text with a trained GPT, and print it token by token. One text at a time, no batches.

A text may be longer than a row: the model sees the last `seq_len` tokens. Each new token costs a
forward pass over all of them, because keys and values are not cached; for fast generation, export
the model to a library that caches them.

With logits 4, 2, 1 and 0, --top-k 2 and --temperature 0.8, the last two tokens are never drawn, and
the first is e^(2 / 0.8) = 12.2 times as likely as the second. Tokens are drawn on the CPU, so that
--seed gives the same random numbers on any device.

    python sample.py runs/gpt-nano-1 --prompt "Call me" --tokens 200
"""

import codecs
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import tiktoken

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # see train.py

import torch

import config
from model import Transformer
from support import checkpoint, process, runtime
from support import clock as rng
from support.fsdp import evaluating, of_rank0
from support.numbers import count, whole_number
from support.tokenizer import fingerprint, get_encoding, tokenizer_in, vocab_size
from support.weights import real_weights, running_layers


def continue_text(
    model: Transformer, encoding: tiktoken.Encoding, prompt: str, most: int, **options: object
) -> Iterator[str]:
    """Yield a document that begins with `prompt`, piece by piece.

    Args:   options passed to `generate`
    Raises: ValueError if the tokenizer has tokens that the model does not know
    """
    allowed, known = vocab_size(encoding, "gpt"), model.config.vocab_size
    if allowed > known:
        raise ValueError(f"tokenizer {encoding.name} has {allowed} tokens, the model only {known}")
    end = encoding.eot_token
    start = encoding.encode_ordinary(prompt)
    drawn = generate(model, [end, *start], most, allowed=allowed, stop=end, **options)
    pieces = map(encoding.decode_single_token_bytes, chain(start, drawn))
    # a character is yielded once all its bytes are drawn; U+FFFD replaces what is not UTF-8
    return codecs.iterdecode(pieces, "utf-8", "replace")


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
) -> Iterator[int]:
    """Draw up to `most` tokens after a prompt, one at a time.

    Args: prompt      at least one token
          allowed     draw only ids below this; the others pad the vocabulary
          stop        a token that ends the text and is not yielded, or None
          temperature divides the logits; 0 always takes the likeliest token
          top_k       draw among this many likeliest tokens
          generator   a CPU generator: tokens are drawn on the CPU, wherever the model is
    """
    tokens = list(prompt)
    device = model.wte.weight.device
    with evaluating(model):
        for _ in range(most):
            context = torch.tensor([tokens[-model.config.seq_len :]], device=device)  # (1, T)
            last = model(context)[0, -1]  # (C,)
            best = model.logits(last)[:allowed].topk(min(top_k, allowed))
            if temperature == 0:
                drawn = best.indices[0]
            else:
                scores = best.values.cpu().double()
                # subtract the best score, so that no temperature is too low
                probabilities = ((scores - scores[0]) / temperature).softmax(0)
                drawn = best.indices[torch.multinomial(probabilities, 1, generator=generator)[0]]
            tokens.append(int(of_rank0(model, drawn)))
            if tokens[-1] == stop:
                break
            yield tokens[-1]


# ---- the command


def load_run(folder: str, which: str) -> tuple[config.Config, Transformer, dict]:
    """Load the settings of a run, its model with a checkpoint's weights, and the checkpoint.

    Args: which last | best, or the path of a checkpoint
    """
    path = checkpoint.find(folder, which)
    state = checkpoint.load(path)
    tokenizer = tokenizer_in(path.parent, state["config"]["data.tokenizer"])
    settings = config.build(state["config"] | {"data.tokenizer": tokenizer}, will_run=False)
    shape = config.transformer_config(settings, **state["model_size"])
    model = replace(shape, layers=len(running_layers(state))).build()
    checkpoint.load_weights(model, real_weights(state))
    return settings, model.eval(), state


def main(argv: list[str] | None = None) -> None:
    parser = process.Parser(prog="sample.py", description=__doc__.split(". ")[0])
    parser.add_argument("run", help="folder of a run, or a checkpoint")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a path")
    parser.add_argument("--prompt", default="", help="text to continue (default: none)")
    parser.add_argument("--tokens", type=count, default=200, help="draw at most this many")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    parser.add_argument("--top-k", type=count, default=50, help="draw among this many tokens")
    parser.add_argument("--samples", type=count, default=1, help="how many texts to print")
    parser.add_argument("--seed", type=whole_number, default=1, help="of the random draws")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--dtype", default="auto", choices=("auto", *runtime.DTYPES))
    args = parser.parse_args(argv)
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature {args.temperature}: choose 0 or a positive number")
    here = runtime.start(args.device, args.dtype)
    settings, model, state = load_run(args.run, args.checkpoint)
    if settings.model.model != "gpt":
        raise ValueError(f"{args.run} holds a BERT, which writes no text")
    encoding = get_encoding(settings.data.tokenizer)
    if fingerprint(encoding) != state["tokenizer_fingerprint"]:
        raise ValueError(f"{args.run} was trained with other tokens than {encoding.name} has now")
    model.to(here.device)
    for number in range(args.samples):
        if number:
            print("-" * 40)
        options = {"temperature": args.temperature, "top_k": args.top_k}
        options["generator"] = rng.generator(torch.device("cpu"), args.seed, number)
        text = continue_text(model, encoding, args.prompt, args.tokens, **options)
        try:
            with torch.inference_mode(), here.autocast():
                for piece in text:
                    if sys.stdout.isatty():  # weights from a stranger could control the terminal
                        piece = process.printable(piece, kept="\n\t")
                    print(piece, end="", flush=True)
        finally:  # also after an interrupt
            print(flush=True)


if __name__ == "__main__":
    process.exit_cleanly(main)
