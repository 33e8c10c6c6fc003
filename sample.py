"""Print text that a trained GPT writes. No cache of keys and values, no batches.

The model sees the last `seq_len` tokens of the text so far, so a text may be longer than a row.

    python sample.py runs/gpt-nano-1 --prompt "Call me" --tokens 200
"""

import math

import tiktoken
import torch
from torch import Tensor

import config
import pseudo
from model import Transformer
from support import checkpoint, rng, runtime, sharded_checkpoint
from support.sharded import of_rank0
from support.tokenizer import get_encoding, vocab_size


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Tensor,
    count: int,
    *,
    allowed: int,
    stop: int | None = None,
    temperature: float = 0.8,
    top_k: int = 50,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw up to `count` tokens after a prompt, one at a time.

    Args:    prompt      (T,) int64, at least one token
             allowed     only ids below this are drawn; the others pad the vocabulary
             stop        a token that ends the text, or None
             temperature 0 takes the likeliest token; otherwise logits are divided by it
             top_k       draw among this many likeliest tokens
    Returns: (T + count,) int64; shorter if `stop` was drawn, which is left out
    Cost:    a full forward pass for each token: keys and values are not cached
    """
    was_training = model.training
    model.eval()
    tokens = prompt[None]  # (1, T)
    for _ in range(count):
        logits = model.logits(tokens[:, -model.config.seq_len :])[0, -1, :allowed]  # (allowed,)
        best = logits.topk(min(top_k, allowed))
        if temperature == 0:
            drawn = best.indices[0]
        else:
            probabilities = (best.values / temperature).softmax(0)
            drawn = best.indices[torch.multinomial(probabilities, 1, generator=generator)[0]]
        if of_rank0(model, drawn) == stop:
            break
        tokens = torch.cat((tokens, drawn.view(1, 1)), dim=1)
    model.train(was_training)
    return tokens[0]


def write(model: Transformer, encoding: tiktoken.Encoding, prompt: str, count: int, **how) -> str:
    """Return a text that begins with `prompt`; `how` goes to `generate`.

    The prompt is taken for the beginning of a document.
    """
    end = encoding.eot_token
    device = model.wte.weight.device
    start = torch.tensor([end, *encoding.encode_ordinary(prompt)], device=device)
    tokens = generate(model, start, count, allowed=vocab_size(encoding, "gpt"), stop=end, **how)
    return encoding.decode(tokens[1:].tolist())


def load_run(folder: str, which: str) -> tuple[config.Config, Transformer, dict]:
    """Load a run: its settings, its model with the weights of a checkpoint, and that checkpoint.

    Args:   which last | previous | best, or the path of a checkpoint
    Raises: ValueError if the folder holds no checkpoint, or a damaged one
    """
    state = sharded_checkpoint.load(checkpoint.find(folder, which))
    settings = config.build(state["config"])
    model = Transformer(config.transformer_config(settings, **state["model_size"]))
    if "pseudo" in state:
        pseudo.share(model, state["pseudo"]["owners"])
    model.load_state_dict(state["model"])
    return settings, model.eval(), state


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(prog="sample.py", description=__doc__.split(". ")[0])
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--checkpoint", default="last", help="last, previous, best, or a file")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="draw at most this many")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-k", type=int, default=50, help="draw among this many")
    parser.add_argument("--samples", type=int, default=1, help="texts to print")
    parser.add_argument("--seed", type=int, default=1, help="decides the draws")
    args = parser.parse_args(argv)
    for name in ("tokens", "top_k", "samples"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {getattr(args, name)}: choose 1 or more")
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature {args.temperature}: choose 0 or a positive number")
    settings, model, _ = load_run(args.run, args.checkpoint)
    if settings.model.model != "gpt":
        raise ValueError(
            f"{args.run} holds a BERT, which does not write text: evaluate.py scores it"
        )
    encoding = get_encoding(settings.data.tokenizer)
    for number in range(args.samples):
        generator = rng.generator(torch.device("cpu"), args.seed, number)
        print(
            write(
                model,
                encoding,
                args.prompt,
                args.tokens,
                temperature=args.temperature,
                top_k=args.top_k,
                generator=generator,
            )
        )
        if number + 1 < args.samples:
            print("-" * 40)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
