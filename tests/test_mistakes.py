"""Common mistakes end in one line that names the mistake, with exit status 2.

Each case is a command line; S is a store, R a run of two steps. The tests of each file have more
refusals, of damaged files for example. Other errors may end in a traceback and status 1.
"""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import SMALL, command_error, names

from support.checkpoint import ALONE
from support.process import exit_cleanly

TRAIN = f"train {SMALL} --data S --out new"
CASES = {  # command -> part of its message
    # flags
    "train --colour red": "unrecognized arguments: --colour red (see --help)",
    "train --model llama": "did you mean --block llama?",
    "train --epochs 3": "did you mean --tokens, which counts tokens?",
    "train --batch_size=8": "did you mean --batch-tokens, which counts tokens?",
    "train --resume runs/x": "did you mean --resume --out runs/x?",
    "train --tokens 50 K": "(a value is one word, such as 50K; a switch such as --pack takes none)",
    "train --pack=true": "; a switch such as --pack takes none",
    "train --out=": "--out must be a str, not empty, got '': folder for",
    "train --vocab-size 9": "--vocab-size 9 (see --help)",
    "evaluate R --batch-size 8": "--batch-size 8 (see --help)",
    "train --tokens=": "--tokens: '' is not a whole number",
    "train --tokens 9e18": "--tokens must be at least 1 and at most 1000000000000000, got 9",
    "train --lr 1e300": "--lr must be above 0 and at most 1000, got 1e+300",
    f"{TRAIN} --ltd-start 64": "--ltd-start 64 has no effect without --ltd: add it",
    f"{TRAIN} --nsp": "--nsp needs a BERT: add --model bert",
    f"{TRAIN} --pos learned --seq-len 4096": "--seq-len 4096",
    f"{TRAIN} --batch-tokens 100": "--batch-tokens 100",
    f"{TRAIN} --warmup-tokens 9999": "--warmup-tokens 9999 must be below --tokens 4096",
    f"{TRAIN} --init R --pseudo": "--init and --pseudo exclude",
    f"{TRAIN} --fsdp --offload": "--offload",
    f"{TRAIN} --model bert --tokenizer gpt2": "gpt2",
    # the machine
    f"{TRAIN} --device cpu --compile on": "--compile on: torch needs a C++ compiler",
    f"{TRAIN} --device cuda": "--device cuda: torch finds only cpu here",
    # files
    f"{TRAIN} --data nowhere": "nowhere: not a token store: make one with prepare.py",
    f"{TRAIN} --data words.txt": "words.txt: not a token store",
    f"{TRAIN} --data S=1,./S=1": "'./S=1' is not another PATH=WEIGHT",
    f"{TRAIN} --data S --tokenizer pd4k": "S: made with tokenizer bytes",
    f"{TRAIN} --init gpt2": "--init gpt2: not found; name weights on disk: nothing is downloaded",
    f"{TRAIN} --init words.txt": "--init words.txt: cannot be loaded",
    f"{TRAIN} --init R --layers 3": "is a model with --layers 4, not --layers 3",
    # runs
    f"train {SMALL} --data S --out R": "--out R is not an empty folder: name a new one",
    f"train {SMALL} --data S --out full": "--out full is not an empty folder",
    f"train {SMALL} --data S --out gone": "--out gone is not an empty folder",
    f"train {SMALL} --data S --out gone/x": "gone is read-only or no folder: name one elsewhere",
    "train --resume --out renamed": "--resume: config.json of renamed is gone: put it back",
    "train --resume --out words.txt": "--resume: words.txt holds no run; name one with --out",
    "train --resume": "--resume: runs/ holds no run; name one with --out",
    "train --resume --out full": "--resume: full holds no run",
    "train --resume --out R --tokens 9": "--tokens 9 is less than the 512 of R",
    "train --resume auto": "--resume auto needs the folder of the run: add --out",
    # text
    "prepare nowhere.txt --out new": "nowhere.txt",
    "prepare words.txt --out S": "--out S: exists already: remove it or name another folder",
    "prepare empty.txt --out new": "empty.txt",
    "prepare words.txt --out gone": "--out gone: exists already: remove it or name another folder",
    "prepare words.txt --out new --tokenizer klingon": "klingon",
    "prepare words.txt --out new --split-on=": "--split-on '' has no effect here",
    "prepare words.txt --out new --text-column body": "--text-column body has no effect on plain",
    # the other commands
    "evaluate nowhere": "nowhere does not exist: name the folder of a run, or a checkpoint",
    "sample R/step-00000009.pt": "R/step-00000009.pt does not exist",
    "evaluate foreign.pt": "foreign.pt is not a checkpoint of train.py",
    "evaluate changed.pt": "tiny has changed since changed.pt was trained: name it with --data",
    "evaluate copied": "copied/step-00000002.pt belongs to another run than copied/config.json",
    "evaluate renamed": "renamed/step-00000009.pt is that of step 2: give it its name back",
    "evaluate R --by-document S/meta.json": "--by-document S/meta.json: name a new file",
    "report R --out S/meta.json": "--out S/meta.json: name a page, such as compared.html",
    "report typed": "typed: log.jsonl is damaged: AttributeError",
    "report listed": "listed: log.jsonl is damaged: KeyError 'config'",
    "packing 100 abc": "100 abc: name lengths in tokens, or a folder",
    "packing -5": "-5: name lengths in tokens, or a folder",
    "packing 3 4 --max-len 1e18": "is too long: choose at most 2^24 tokens",
    "sample R/config.json": "R/config.json is damaged or no checkpoint: File is not a zip file\n",
    f"{TRAIN} --init damaged": "step-00000001.pt is damaged",
    "report nowhere": "nowhere has no log.jsonl with a run's start: name the folder",
    "analyze S --metric loudness": "--metric 'loudness' is unknown",
}


@pytest.fixture(scope="module")
def place(store_dir, run_of, tmp_path_factory):
    place = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(store_dir, place / "S")
    shutil.copytree(run_of(), place / "R")
    state = torch.load(place / "R/step-00000002.pt")
    torch.save(state | {"store": {}}, place / "changed.pt")
    (place / "gone").symlink_to("nowhere")
    (place / "words.txt").write_text("all the words there are\n" * 99)
    (place / "empty.txt").write_text("")
    torch.save({"wte": torch.ones(3)}, place / "foreign.pt")
    (place / "damaged").mkdir()
    (place / "damaged/step-00000001.pt").write_bytes(b"PK")
    for name, step in ("copied", 2), ("renamed", 9), ("listed", 2), ("typed", 2):
        (place / name).mkdir()
        shutil.copy(place / "R/step-00000002.pt", place / name / f"step-{step:08d}.pt")
    (place / "copied/config.json").write_text('{"run": "another"}')
    (place / "typed/log.jsonl").write_text('{"event": "run", "config": null}\n')
    (place / "listed/log.jsonl").write_text('[1, 2]\n{"event": "run"}\n')
    (place / "full").mkdir()
    (place / "full/a.txt").write_text("the user's")
    return place


@pytest.mark.parametrize("line", CASES)
def test_a_mistake_is_one_line_and_status_2_and_writes_nothing(line, place, monkeypatch, capsys):
    if "cuda" in line and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(place)
    monkeypatch.setenv("CXX", "no-compiler")
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}
    command, *flags = line.split()
    main = importlib.import_module(command).main
    message = command_error(main, [f"{command}.py", *flags], monkeypatch, capsys)
    assert CASES[line] in message, message
    after = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}
    assert after == before, "a file was changed"
    assert "new" not in names(place)


def test_a_line_that_cannot_be_printed_ends_no_run_but_an_evaluation(monkeypatch):
    """It is "é" in ASCII, on a full disk; or there is no stdout, as after the shell's `>&-`."""
    with open("/dev/full", "w", encoding="ascii") as full:
        for stream in (full, None):
            monkeypatch.setattr(sys, "stdout", stream)
            with pytest.raises(SystemExit) as ended:
                exit_cleanly(lambda: ALONE.say("é"))
            assert ended.value.code == 0
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            exit_cleanly(lambda: print("the result"))
        assert ended.value.code == 2
