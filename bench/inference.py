"""What packed rows save of an evaluation.

The time to score a task by evaluate.py's own functions: the last word of each held-out paragraph of
the embedded corpus, with items side by side in rows and with one a row. Checked first: both find
the same nats. Models have random weights, on which time does not depend.

    OMP_NUM_THREADS=2 python bench/inference.py --record    # nano
    python bench/inference.py --size 124M --device cuda
"""

import math
import re
from collections.abc import Callable
from functools import partial

import tiktoken
from measure import command_line, in_turns, quartiles, ratios, recorder, turn_of
from step import model_of

import config
import evaluate
from data import Samples
from model import Transformer
from prepare import embedded_store
from support import runtime
from support.evaluation.tasks import Question, Task, answers_of, items_of
from support.step.sizes import SIZES
from support.store import Store, get_encoding

SEQ_LEN = 512  # of an evaluation
ROWS = 16  # of an evaluation at once
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-3}  # of the nats in all: fp32, and bf16 on a GPU


def model_for(flags: str, words: int, device: str) -> Transformer:
    """A model for a tokenizer of so many words."""
    model = model_of(config.build(config.parse(flags.split())), -(-words // 64) * 64)
    return model.to(runtime.start(device, "auto").device).eval()


def last_words(store: Store, samples: Samples, encoding: tiktoken.Encoding, tokens: float) -> Task:
    """The held-out paragraphs of two words and more, of so many tokens in all, as questions."""
    questions, read = [], 0
    for number in samples.documents:
        first, end = store.offsets[number : number + 2]
        text = encoding.decode(store.tokens[first : end - 1].tolist())
        for paragraph in text.split("\n\n"):
            cut = re.fullmatch(r"(.*\S)(\s\S+)\s*", paragraph, re.DOTALL)
            if cut and read < tokens:
                read += len(encoding.encode_ordinary(paragraph))
                questions.append(Question("held-out", [cut[1]], [cut[2]], 0))
    return Task("last words", "last word", questions, 0)


def measure_evaluation(size: str, tokens: float, device: str, turns: int, keep: Callable) -> None:
    encoding, store = get_encoding("pd4k"), Store.open(embedded_store("pd4k"))
    model = model_for(f"--size {size} --seq-len {SEQ_LEN} --pos rope", encoding.n_vocab, device)
    here = runtime.start(device, "auto")
    samples = Samples(store, "pieces", SEQ_LEN, "val")
    items = items_of(last_words(store, samples, encoding, tokens), encoding, SEQ_LEN, show=True)

    def nats(is_packed: bool) -> float:
        laid = evaluate.lay_texts(items.texts, SEQ_LEN, pack=is_packed)
        return answers_of(laid, model, here, ROWS).nats.sum()

    packed = nats(True)
    alone = nats(False)
    if not abs(alone / packed - 1) < TOLERANCE[device]:
        raise ValueError(f"alone finds {alone} nats, packed {packed}: not timed")
    variants = {"packed": partial(nats, True), "alone": partial(nats, False)}
    seconds = in_turns(variants, turns, lambda read: turn_of(read).seconds)
    length = items.texts.spans[:, 1] - items.texts.spans[:, 0]
    keep(
        {
            "items": len(length),
            "tokens": int(length.sum()),
            "seq_len": SEQ_LEN,
            "rows": ROWS,
            "items_per_s": {n: quartiles([len(length) / s for s in t]) for n, t in seconds.items()},
            "times_as_fast": quartiles(ratios(seconds["alone"], seconds["packed"])),
        }
    )


def main() -> None:
    parser = command_line(__doc__, turns=9)
    parser.add_argument("--size", choices=[s for s in SIZES if "bert" not in s], default="nano")
    parser.add_argument("--tokens", type=int, help="to score (all)")
    args = parser.parse_args()
    keep = recorder("evaluation", args, size=args.size, turns=args.turns)
    measure_evaluation(args.size, args.tokens or math.inf, args.device, args.turns, keep)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
