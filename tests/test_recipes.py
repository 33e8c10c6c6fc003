"""Every command of docs/recipes.md and of the techniques' pages runs, at a small size.

First the test makes the files that the commands name: folders of text and published weights.
Commands that train get flags that make the model tiny. GPT-2's tokenizer, which would have to be
downloaded, is replaced by bytes.
"""

import importlib
import json
import shlex
from pathlib import Path

import pytest
import torch
from test_readme import TECHNIQUES, commands_of, documents, read

from kernels.rotary import Scaling
from model import Transformer, TransformerConfig
from prepare import write_ranks
from support.process import ROOT
from support.published import GPT2_LAYOUT, LLAMA_LAYOUT, published_views, save_file

PAGES = ["docs/recipes.md", *TECHNIQUES]
TINY = "--heads 2 --width 32 --seq-len 32 --batch-tokens 256 --tokens 512"
TINY += " --eval-tokens 200 --final-eval-tokens 200 --device cpu"
SMALLER = {"gpt2": "bytes", "4096": "300", "200": "20"}
SMALLER |= {"discrete:128@0.5:512@0.85:2048": "discrete:8@0.5:16@0.85:32", "STORE": "store"}
SMALLER |= {"64,1": "8,1", "128": "8", "450K": "512"}
SIZES = ("--size", "124M", "350M", "1.3B")


def at_toy_size(module: str, arguments: list[str], layers: int) -> list[str]:
    """Shrink a command. If a flag is given twice, the last value counts."""
    words = [SMALLER.get(word, word) for word in arguments if word not in SIZES]
    return [*words, *TINY.split(), "--layers", str(layers)] if module == "train" else words


def make_input_files() -> None:
    """Make the files and folders that the page's commands name."""
    text = "".join(map(read, documents()))
    pages = [text[first : first + 2000] for first in range(0, 30_000, 2000)]
    for folder in ("my-text", "web"):
        (Path() / folder).mkdir()
        for number, page in enumerate(pages):
            (Path() / folder / f"{number}.py").write_text(f"# {folder}\n{page}")
    Path("corpus").symlink_to(ROOT / "corpus")
    torch.manual_seed(0)
    Path("llama").mkdir()
    write_ranks(Path("llama/tokenizer.model"), {bytes([byte]): byte for byte in range(256)})
    about = dict(model_type="llama", hidden_size=32, num_attention_heads=2, num_hidden_layers=3)
    about |= dict(intermediate_size=128, num_key_value_heads=2, rope_theta=5e5)
    about |= dict(rms_norm_eps=1e-5, tie_word_embeddings=True)
    about["rope_scaling"] = Scaling(8, 1, 4, 64).as_published()
    Path("llama/config.json").write_text(json.dumps(about))
    llama = dict(pos="rope", norm="rmsnorm", mlp="swiglu", bias=False)
    for file, layout, rows, switches in (
        ("gpt2.safetensors", GPT2_LAYOUT, 320, {}),
        ("llama/model.safetensors", LLAMA_LAYOUT, 512, llama),
    ):
        model = Transformer(TransformerConfig(3, 2, 32, 128, 32, rows, **switches))
        with open(file, "wb") as out:
            save_file(out, published_views(model.state_dict(), layout))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page, store_dir, no_sample_or_report, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_input_files()
    Path("store").symlink_to(store_dir)
    ran = []
    for line in commands_of(read(page).replace("torchrun --nproc-per-node 8", "torchrun")):
        words = shlex.split(line, comments=True)
        name, *arguments = (word for word in words if word not in ("python", "torchrun", "-m"))
        module = name.removesuffix(".py")
        arguments = at_toy_size(module, arguments, layers=3 if "recipes" in page else 6)
        ran.append(f"{module} {shlex.join(arguments)}")
        try:
            status = importlib.import_module(module).main(arguments)
        except (ValueError, SystemExit) as error:
            pytest.fail(f"{ran[-1]}: {error}")
        assert not status, f"{ran[-1]}\n{capsys.readouterr().out}"
    known = {"train", "prepare", "report", "evaluate", "sample"}
    assert ran and ("recipes" not in page or {line.split()[0] for line in ran} >= known)
