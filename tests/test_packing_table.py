"""What packing would give: stores, long documents, the table, rows as text and as a picture."""

import json
import sys

import pytest
from small_stores import write_store

from packing import DEFAULT, PACKERS, main, pack, rows_as_text
from support.rows.packs import histogram


@pytest.fixture
def store(tmp_path):
    """Documents of 8, 3, 2 and 1 tokens with their end-of-text, and one that is held out."""
    path = write_store(tmp_path / "store", [[0] * 7, [0, 1], [2], []])
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "skipped": 3}))
    return str(path)


@pytest.mark.parametrize(("long", "pieces", "rows"), [("split", 5, 3), ("truncate", 4, 3)])
def test_a_store_is_packed_by_its_own_lengths(store, long, pieces, rows, capsys):
    main([store, "--max-len", "5", "--long", long, "--packer", "lpfhp", "--json"])
    # split: 5, 3, 3, 2, 1 in rows of 5; truncated: 5, 3, 2, 1
    out, err = capsys.readouterr()
    assert f"3 empty ones were skipped; 1 longer than a row: --long {long} makes {pieces}" in err
    assert ("in all, 3 tokens are left out" in err) == (long == "truncate")
    found = json.loads(out.splitlines()[0])
    assert (found["packs"], found["factor"]) == (rows, pieces / rows)


def test_table_has_every_packer_at_every_depth(store, capsys):
    pytest.importorskip("scipy", reason="SciPy is not installed")
    main([store, "--max-len", "5"])
    lines = capsys.readouterr().out.splitlines()
    header = ["packer", "most", "rows", "at", "least", "full", "a", "row", "attention", "seconds"]
    assert lines[0].split() == header
    assert [line.split()[:2] for line in lines[1:]] == [
        [packer, depth] for depth in ("all", "2", "3", "4") for packer in PACKERS
    ]
    assert "100.000%" not in lines[1]


def test_table_says_what_it_leaves_out(store, capsys, monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "scipy", None)
    main([store, "--max-len", "5", "--max-per-pack", "2"])
    out, err = capsys.readouterr()
    assert "optimal: --packer optimal needs SciPy" in err and "optimal" not in out
    assert len(out.splitlines()) == 1 + len(PACKERS) - 2
    with pytest.raises(ValueError, match="--packer optimal needs SciPy"):
        main([store, "--max-len", "5", "--packer", "optimal", "--max-per-pack", "2"])


def test_rows_as_text():
    packing = pack(histogram([6, 2, 5], 8), DEFAULT)
    long, short = rows_as_text(packing)
    assert long == f"|{'a' * 48}{'b' * 16}| 6 + 2 = 8 of 8"
    assert short == f"|{'a' * 40}{'.' * 24}| 5 = 5 of 8"
    (many,) = rows_as_text(pack(histogram([1] * 9, 9), DEFAULT))
    assert many.endswith(" 1 + 1 + ... = 9 of 9") and "|aaaaaaabbbbbbb" in many


def test_of_many_rows_those_of_several_documents_are_shown():
    packing = pack(histogram([8] * 99 + [6, 2] * 20, 8), DEFAULT)
    shown = list(rows_as_text(packing))
    assert len(shown) == 12 and all(line.endswith("6 + 2 = 8 of 8") for line in shown)


def test_picture(tmp_path, capsys):
    file = tmp_path / "rows.svg"
    main(["100", "90", "60", "50", "--max-len", "128", "--plot", str(file)])
    assert file.read_text().count('<polyline class="area') == 4, "a bar for each document"
    with pytest.raises(ValueError, match=r"--plot rows\.png: write \.svg"):
        main(["100", "--plot", "rows.png"])
