"""What an evaluation found, in a file: a line a document, whole or not at all."""

import json

import numpy as np
import pytest

from support.scores import Documents, HeldOut, check_file

FOUND = Documents(
    numbers=np.array([7, 8]),
    nats=np.array([3 * np.log(2), 0.0]),
    targets=np.array([3, 0]),
    bytes=np.array([6, 0]),
)


def test_worked_by_hand(tmp_path):
    FOUND.write(tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == [
        {"document": 7, "tokens": 3, "bytes": 6, "nats": 3 * np.log(2), "bpb": 0.5},
        {"document": 8, "tokens": 0, "bytes": 0, "nats": 0.0, "bpb": None},
    ]
    assert FOUND.total() == HeldOut(np.log(2), 0.5, 3, 6)


def test_what_is_no_number_leaves_no_file(tmp_path):
    (tmp_path / "out.jsonl").write_text("of before")
    with pytest.raises(ValueError, match="JSON"):
        FOUND._replace(nats=np.array([1, np.nan])).write(tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert (tmp_path / "out.jsonl").read_text() == "of before"


def test_a_folder_that_nobody_may_write_in_is_refused(tmp_path, monkeypatch):
    check_file(tmp_path / "out.jsonl")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"^--by-document .*out.jsonl: the folder .* written to$"):
        check_file(tmp_path / "out.jsonl")
