"""What an evaluation found, in a file: a line a document, whole or not at all."""

import json

import numpy as np
import pytest

from support.evaluation.scoring import Documents, HeldOut, check_file

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


def test_by_source_worked_by_hand(tmp_path):
    """Half a bit a byte in `wiki`; `code` has a document without a byte, and `empty` has none."""
    named = FOUND._replace(sources=np.array([1, 0]), source_names=["code", "wiki", "empty"])
    assert named.total() == HeldOut(np.log(2), 0.5, 3, 6, by_source={"wiki": 0.5})
    assert named.total().logged()["by_source"] == {"wiki": 0.5}
    assert "by_source" not in FOUND.total().logged()
    named.write(tmp_path / "named.jsonl")
    FOUND.write(tmp_path / "plain.jsonl")
    assert (tmp_path / "named.jsonl").read_text() == (tmp_path / "plain.jsonl").read_text()


def test_a_few_sources_are_shown_and_many_or_a_single_one_only_logged():
    found = HeldOut(1.0, 1.6134, 3, 6)
    assert str(found) == "1.6134 bits per byte"
    two = found._replace(by_source={"wiki": 1.5, "code": 2.1})
    assert str(two) == "1.6134 bits per byte (wiki 1.500, code 2.100)"
    assert str(found._replace(by_source={"wiki": 1.5})) == "1.6134 bits per byte"
    many = dict.fromkeys(map(str, range(7)), 1.0)
    assert str(found._replace(by_source=many)) == "1.6134 bits per byte"


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
