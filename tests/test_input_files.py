"""Which files are read, how many bytes of them, and that a bar is never silent.

python -m pytest tests/test_input_files.py
"""

import gzip
import io
import re
import time
from functools import partial
from pathlib import Path

import pytest

import prepare
from support.text import encoding, reading, tokenizer
from support.text.reading import InputBar, lines_of, read_files

try:
    import zstandard
except ImportError:  # an extra
    zstandard = None

TINY = Path(__file__).resolve().parents[1] / "corpus" / "pd-tiny.jsonl.gz"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """What bars write from here on, as if there were a terminal."""
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    return shown


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_all_bytes_of_a_file_are_counted_as_it_is_read(tmp_path, suffix):
    if suffix == ".zst" and not zstandard:
        pytest.skip("zstandard is an extra")
    compress = {"": bytes, ".gz": gzip.compress, ".zst": getattr(zstandard, "compress", None)}
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress[suffix](b'{"text": "one"}\n' * 1000))
    counted = []
    lines = [line.strip() for line in lines_of(path, counted.append)]
    assert [line for line in lines if line] == [b'{"text": "one"}'] * 1000
    assert sum(counted) == path.stat().st_size


@pytest.mark.parametrize("split_on", [None, "blank-line"])
def test_files_that_are_left_in_the_middle_count_as_read(tmp_path, split_on):
    """A file that is not text: the bar must not stop short of its end."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.bin").write_bytes(b"\xff" * (3 << 20))
    files, counted = reading.input_files([tmp_path]), []
    assert [one.text for one in read_files(files, split_on, on_read=counted.append)] == ["one"]
    assert sum(file.bytes for file in files) == 3 + (3 << 20)
    # cut into documents, a file is first looked through; what is no text is never read again
    assert sum(counted) == (3 if split_on else 3 + (3 << 20))


def test_a_command_shows_how_far_it_is_in_both_of_its_passes(tmp_path, monkeypatch, capsys):
    shown = terminal(monkeypatch)
    monkeypatch.setattr(reading, "tqdm", partial(reading.tqdm, mininterval=0))
    (tmp_path / "in.txt").write_text("some words of text\n" * 50_000)
    prepare.main([str(tmp_path / "in.txt"), "--out", str(tmp_path / "store")])
    for what in ("what to hold out", "encoding"):
        assert re.search(rf"{what}: +\d+%.*\d+k/950k", shown.getvalue()), what
    assert "B/s" in shown.getvalue() and "documents]" in shown.getvalue()
    assert "documents" in capsys.readouterr().out


def test_without_a_terminal_nothing_is_drawn(tmp_path, capsys):
    prepare.main([str(TINY), "--out", str(tmp_path / "store")])
    assert capsys.readouterr().err == ""


def test_a_bar_goes_on_while_one_task_takes_long(tmp_path, monkeypatch):
    """As with a long text that no blank parts: nothing is done, and the clock moves."""
    monkeypatch.setattr(reading, "TICK_S", 0.05)
    monkeypatch.setattr(encoding, "TICK_S", 0.05)
    encode = encoding.encode_batch

    def slow(*args, **options):
        time.sleep(0.5)
        return encode(*args, **options)

    monkeypatch.setattr(encoding, "encode_batch", slow)
    shown = terminal(monkeypatch)
    prepare.prepare([TINY], tmp_path / "store", tokenizer.get_encoding("bytes"), "bytes")
    assert shown.getvalue().count("encoding: ") >= 5


def test_what_is_read_moves_the_bar_only_when_it_is_done(tmp_path, monkeypatch):
    terminal(monkeypatch)
    (tmp_path / "a.txt").write_text("x" * 100)
    with InputBar(reading.input_files([tmp_path / "a.txt"]), "reading") as bar:
        bar.on_read(100)
        assert bar.bar.n == 0
        bar.done(60, 1)
        assert bar.bar.n == 60
        bar.done(100, 2)
        assert bar.bar.n == 100
