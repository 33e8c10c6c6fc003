"""Packing: every document once, no row too full, never more rows than the published packers."""

import json
import sys

import numpy as np
import pytest
from conftest import refusal_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from packing import PACKERS, main, next_fit, pack, pack_lengths
from support.rows.cutting_stock import NEED_SCIPY
from support.rows.packs import LONGEST_ROW, MOST_TOKENS, Packing, assign, histogram

GREEDY = ("spfhp", "lpfhp", "bfd", "ffd")
items = st.lists(st.integers(1, 64), max_size=60)
depths = st.none() | st.integers(1, 5)


@st.composite
def histograms(draw, longest=24, most=9):
    """Counts of 1 to so many lengths; every second one has only a few that are not 0."""
    counts = draw(st.lists(st.integers(0, most), min_size=1, max_size=longest))
    if draw(st.booleans()):
        counts = [n if draw(st.integers(0, 3)) == 0 else 0 for n in counts]
    assume(any(counts))
    return np.array([0, *counts])


@st.composite
def histograms_of_most_tokens(draw, longest=16):
    """Counts, as Python's integers, of exactly 2^53 tokens: a few of some lengths, many of others.

    One count takes what is left over, and documents of length 1 what that one cannot.
    """
    largest = MOST_TOKENS // longest**2
    few_or_many = st.sampled_from([0, 1, 7, largest]) | st.integers(0, largest)
    counts = [0, *draw(st.lists(few_or_many, min_size=1, max_size=longest))]
    left = MOST_TOKENS - sum(length * count for length, count in enumerate(counts))
    length = draw(st.integers(1, len(counts) - 1))
    counts[length] += left // length
    counts[1] += left % length
    return counts


def names(packers=PACKERS):
    """The packers as parameters of a test; those that need SciPy skip where it is missing."""
    return [
        pytest.param(p, marks=pytest.mark.skipif(lacks_scipy(), reason="SciPy is not installed"))
        if p in NEED_SCIPY
        else p
        for p in packers
    ]


def lacks_scipy():
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        return True
    return False


needs_scipy = pytest.mark.skipif(lacks_scipy(), reason="SciPy is not installed")


def documents_of(counts):
    return np.repeat(np.arange(len(counts)), counts)


# ---- slow oracles


def item_by_item(lengths, max_len, fits_best):
    """Packs of a greedy packer that places one document after the other, the longest first."""
    spaces = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, space in enumerate(spaces) if space >= length]
        if fitting:
            i = min(fitting, key=lambda i: spaces[i]) if fits_best else fitting[0]
            spaces[i] -= length
        else:
            spaces.append(max_len - length)
    return len(spaces)


def published(counts, max_per_pack, longest_pack_first):
    """Packs of the paper's SPFHP and LPFHP as Graphcore's code defines them.

    Open packs are kept by the space they have left; of those with equal space the last comes first.
    SPFHP looks from the most space downwards and puts one document into each pack. LPFHP looks
    upwards, begins anew after each step, and repeats a length in a pack as often as it fits.
    """
    max_len = len(counts) - 1
    most = max_per_pack or max_len
    open_packs = {space: [] for space in range(max_len + 1)}  # space -> [(packs, documents in it)]
    total = 0
    for length in range(max_len, 0, -1):
        left = int(counts[length])
        while left:
            spaces = [s for s in range(length, max_len + 1) if open_packs[s]]
            if spaces:
                space = min(spaces) if longest_pack_first else max(spaces)
                packs, held = open_packs[space].pop()
            else:
                space, packs, held = max_len, left, 0
            times = min(space // length, most - held, left) if longest_pack_first else 1
            used = min(packs, left // times)
            if spaces and packs > used:
                open_packs[space].append((packs - used, held))
            if not spaces:
                total += used
            if held + times < most and space > times * length:
                open_packs[space - times * length].append((used, held + times))
            left -= used * times
    return total


def fewest_packs(lengths, max_len, max_per_pack):
    """The fewest packs of a few documents, by trying every way."""
    best = len(lengths)

    def place(i, packs):
        nonlocal best
        if len(packs) >= best:
            return
        if i == len(lengths):
            best = len(packs)
            return
        for k, (space, slots) in enumerate(packs):
            if space >= lengths[i] and slots:
                place(i + 1, [*packs[:k], (space - lengths[i], slots - 1), *packs[k + 1 :]])
        place(i + 1, [*packs, (max_len - lengths[i], max_per_pack - 1)])

    place(0, [])
    return best


# ---- worked by hand


def test_worked_example():
    packs = pack_lengths([3, 6, 5, 2], 8)
    assert packs.items.tolist() == [1, 3, 2, 0] and packs.offsets.tolist() == [0, 2, 4]
    assert pack_lengths([3, 6, 5, 2], 8).lists() == [[1, 3], [2, 0]]
    assert pack_lengths([], 8).lists() == []
    assert pack_lengths([8, 8], 8).lists() == [[0], [1]]


def test_takes_the_fullest_row_that_still_holds_the_item():
    # 7 and 6 open rows with 3 and 4 left; the 3 goes where it fits exactly, not where room is most
    assert pack_lengths([7, 6, 3], 10).lists() == [[0, 2], [1]]


def strategies_of(packing):
    cuts = np.split(packing.lengths, packing.offsets[1:-1])
    return [(tuple(cut.tolist()), int(n)) for cut, n in zip(cuts, packing.counts, strict=True)]


def test_strategies_and_counts_by_hand():
    # the 6s take a 2 each, the 5s a 3; the 2 that is left goes on its own
    counts = histogram([6, 6, 5, 5, 3, 3, 2, 2, 2], 8)
    packing = pack(counts, "lpfhp")
    assert strategies_of(packing) == [((6, 2), 2), ((5, 3), 2), ((2,), 1)]
    assert packing.packs == packing.lower_bound == 5
    assert packing.factor == 9 / 5
    assert packing.efficiency == 34 / 40
    assert packing.attention == (2 * 40 + 2 * 34 + 4) / (5 * 64)


def test_shortest_pack_first_takes_the_most_space():
    # 6 and 5 leave 4 and 5: the 3 goes beside the 5, longest pack first puts it beside the 6
    assert strategies_of(pack(histogram([6, 5, 3], 10), "spfhp")) == [((6,), 1), ((5, 3), 1)]
    assert strategies_of(pack(histogram([6, 5, 3], 10), "lpfhp")) == [((6, 3), 1), ((5,), 1)]


def test_first_fit_takes_the_oldest_pack():
    # the 2 fits beside 12, and fills 9 + 9, which came later: best fit would put it there
    counts = histogram([12, 9, 9, 2], 20)
    assert strategies_of(pack(counts, "ffd")) == [((12, 2), 1), ((9, 9), 1)]
    assert strategies_of(pack(counts, "lpfhp")) == [((12,), 1), ((9, 9, 2), 1)]


def test_next_fit_keeps_the_order():
    packing = next_fit(np.array([5, 2, 2, 8, 1]), 8)
    assert strategies_of(packing) == [((5, 2), 1), ((2,), 1), ((8,), 1), ((1,), 1)]
    assert pack_lengths([5, 2, 2, 8, 1], 8, "next-fit").lists() == [[0, 1], [2], [3], [4]]
    assert pack_lengths([1, 1, 1, 1, 1], 8, "next-fit", 2).lists() == [[0, 1], [2, 3], [4]]


@needs_scipy
def test_optimal_finds_what_best_fit_does_not():
    # best fit puts a 4 beside the 6, where no 3 fits any more, and needs three packs
    counts = histogram([6, 4, 4, 4, 3, 3], 12)
    assert pack(counts, "lpfhp").packs == 3
    packing = pack(counts, "optimal")
    assert strategies_of(packing) == [((6, 3, 3), 1), ((4, 4, 4), 1)]
    assert packing.lower_bound == 2


@needs_scipy
def test_padding_partners_of_least_squares_are_no_documents():
    # nothing fills a pack of 7 with lengths 5 and 4 alone: their partners 2 and 3 do not exist
    packing = pack(histogram([5, 5, 4], 7), "nnlshp", 2)
    assert strategies_of(packing) == [((5,), 2), ((4,), 1)]


# ---- under random input


@pytest.mark.parametrize("packer", names())
@settings(max_examples=25, deadline=None)
@given(counts=histograms(), max_per_pack=depths, seed=st.integers(0, 99))
def test_every_document_once_and_no_pack_too_full(packer, counts, max_per_pack, seed):
    if packer == "nnlshp":
        max_per_pack = min(max_per_pack or 3, 3)
    max_len = len(counts) - 1
    lengths = np.random.default_rng(seed).permutation(documents_of(counts))
    packs = pack_lengths(lengths, max_len, packer, max_per_pack)
    assert sorted(packs.items.tolist()) == list(range(len(lengths)))
    for row in packs.lists():
        assert 0 < len(row) <= (max_per_pack or len(lengths))
        assert sum(lengths[row]) <= max_len


@pytest.mark.parametrize("packer", names([p for p in PACKERS if p != "next-fit"]))
@settings(max_examples=25, deadline=None)
@given(counts=histograms(), max_per_pack=depths, seed=st.integers(0, 99))
def test_documents_go_where_the_strategies_say(packer, counts, max_per_pack, seed):
    packing = pack(counts, packer, min(max_per_pack or 3, 3))
    lengths = np.random.default_rng(seed).permutation(documents_of(counts))
    packs = assign(packing, lengths)
    rows = [tuple(lengths[row].tolist()) for row in packs.lists()]
    expected = [strategy for strategy, n in strategies_of(packing) for _ in range(n)]
    assert rows == expected
    # equal documents are taken in the order of their numbers, place by place of a strategy
    for length in np.flatnonzero(counts):
        first = [row[0] for row in packs.lists() if lengths[row[0]] == length]
        runs = [tuple(lengths[row].tolist()) for row in packs.lists() if row[0] in first]
        for strategy in set(runs):
            taken = [i for i, run in zip(first, runs, strict=True) if run == strategy]
            assert taken == sorted(taken)


@given(histograms(longest=40))
def test_packs_of_counts_are_those_of_one_document_after_the_other(counts):
    documents, max_len = documents_of(counts).tolist(), len(counts) - 1
    best = item_by_item(documents, max_len, fits_best=True)
    assert pack(counts, "lpfhp").packs == pack(counts, "bfd").packs == best
    assert pack(counts, "ffd").packs == item_by_item(documents, max_len, fits_best=False)


@given(histograms(longest=40), depths)
def test_never_more_packs_than_the_published_packers(counts, max_per_pack):
    assert pack(counts, "lpfhp", max_per_pack).packs <= published(counts, max_per_pack, True)
    assert pack(counts, "spfhp", max_per_pack).packs == published(counts, max_per_pack, False)


@needs_scipy
@settings(max_examples=40, deadline=None)
@given(histograms(longest=40, most=30), depths)
def test_optimal_lies_between_its_bound_and_best_fit(counts, max_per_pack):
    packing = pack(counts, "optimal", max_per_pack)
    assert packing.lower_bound <= packing.packs <= pack(counts, "lpfhp", max_per_pack).packs


@pytest.mark.parametrize("packer", names())
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=7), depth=st.integers(1, 4))
def test_no_bound_is_above_the_fewest_packs(packer, lengths, depth):
    if packer == "next-fit":
        packing = next_fit(np.array(lengths), 10, depth)
    else:
        packing = pack(histogram(lengths, 10), packer, depth)
    assert packing.lower_bound <= fewest_packs(lengths, 10, depth) <= packing.packs


@given(items, st.integers(64, 100))
def test_no_two_rows_would_fit_into_one(lengths, capacity):
    used = sorted(
        sum(lengths[item] for item in row) for row in pack_lengths(lengths, capacity).lists()
    )
    assert len(used) < 2 or used[0] + used[1] > capacity


@pytest.mark.parametrize("packer", GREEDY)
def test_time_does_not_depend_on_the_number_of_documents(packer):
    counts = np.random.default_rng(0).integers(0, 1000, 129)
    counts[0] = 0
    few, many = pack(counts, packer), pack(counts * 10**9, packer)
    assert many.packs <= few.packs * 10**9
    assert many.total(np.ones(129, int)) == counts.sum() * 10**9


@pytest.mark.parametrize("packer", names([p for p in PACKERS if p != "next-fit"]))
@settings(max_examples=25, deadline=None)
@given(counts=histograms_of_most_tokens(), max_per_pack=depths)
def test_numbers_are_exact_up_to_the_most_tokens(packer, counts, max_per_pack):
    if packer == "nnlshp":
        max_per_pack = min(max_per_pack or 3, 3)
    max_len = len(counts) - 1
    packing = pack(counts, packer, max_per_pack)
    held, rows = [0] * (max_len + 1), 0
    for strategy, count in strategies_of(packing):
        assert sum(strategy) <= max_len and 0 < len(strategy) <= (max_per_pack or max_len)
        rows += count
        for length in strategy:
            held[length] += count
    assert held == counts
    assert packing.lower_bound <= packing.packs == rows
    assert packing.factor == sum(counts) / rows
    assert packing.efficiency == MOST_TOKENS / (rows * max_len)
    squares = sum(length**2 * count for length, count in enumerate(counts))
    assert packing.attention == squares / (rows * max_len**2)
    assert packing.total(np.arange(max_len + 1) ** 2) == squares


def test_squares_of_lengths_are_exact_where_int64_ends():
    # 2^31 documents as long as the longest row: 2^53 tokens, whose squares are 2^75 in sum
    documents = MOST_TOKENS // LONGEST_ROW
    packing = Packing(
        lengths=np.array([LONGEST_ROW]),
        offsets=np.array([0, 1]),
        counts=np.array([documents]),
        max_len=LONGEST_ROW,
        lower_bound=documents,
    )
    assert packing.efficiency == packing.attention == 1
    assert np.int64(documents) * np.int64([LONGEST_ROW**2]) == 0  # what int64 makes of 2^75


def test_a_permutation_shuffles_packs_and_keeps_each():
    packs = pack_lengths([3, 6, 5, 2, 8], 8)
    order = np.array([2, 0, 1])
    assert packs.take(order).lists() == [packs.lists()[i] for i in order]
    again = packs.take(np.random.default_rng(5).permutation(3))
    assert again.lists() == packs.take(np.random.default_rng(5).permutation(3)).lists()


# ---- what is refused


@pytest.mark.parametrize("length", [0, 9, -1])
def test_refuses_what_fits_no_row(length):
    with pytest.raises(ValueError, match=f"document of {length} tokens does not fit a row of 1"):
        pack_lengths([3, length], 8)


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ([0, 0, 0], {}, "the histogram is empty"),
        ([], {}, "the histogram is empty"),
        ([0, 2, -1], {}, "-1 documents of length 2"),
        ([3, 2, 1], {}, "3 documents of length 0"),
        ([0, 1.5], {}, "whole numbers"),
        ([[0, 1]], {}, "whole numbers"),
        ([0, 1], {"max_per_pack": 0}, "--max-per-pack 0: a pack holds 1 document or more"),
        ([0, 1], {"packer": "wfd"}, "--packer wfd is unknown: choose one of spfhp, lpfhp"),
        ([0, 1], {"packer": "next-fit"}, "--packer next-fit needs the documents in order"),
    ],
)
def test_refuses_what_is_no_histogram_or_packer(counts, options, message):
    with pytest.raises(ValueError, match=message):
        pack(counts, **options)


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [
        ([0, MOST_TOKENS + 1], MOST_TOKENS + 1),
        ([0, 1, MOST_TOKENS // 2], MOST_TOKENS + 1),
        ([0, 0, 9 * 10**18, 0], 18 * 10**18),  # a count that int64 holds, a sum that it does not
        ([0, 2**63, 1], 2**63 + 2),  # NumPy makes float64 of these two
        ([0, 10**30], 10**30),
    ],
)
def test_more_tokens_than_are_counted_exactly_are_refused(counts, tokens):
    message = f"the histogram has {tokens:,} tokens, and packers count exactly up to 9,007,199,"
    with pytest.raises(ValueError, match=message):
        pack(counts)
    assert pack([0, MOST_TOKENS]).packs == MOST_TOKENS


def test_documents_in_order_of_too_many_tokens_are_refused(monkeypatch):
    monkeypatch.setattr("support.rows.packs.MOST_TOKENS", 20)
    assert next_fit(np.array([8, 8, 4]), 8).packs == 3
    with pytest.raises(ValueError, match="the histogram has 21 tokens, and packers count exactly"):
        next_fit(np.array([8, 8, 5]), 8)


def test_without_the_refusal_numbers_would_be_wrong(monkeypatch):
    monkeypatch.setattr("support.rows.packs.MOST_TOKENS", 2**100)
    count = 4 * 10**18
    assert pack([0, 0, 0, count, 0, 0, 0, 0]).lower_bound < -(-3 * count // 7)  # tokens over 7
    count = 9 * 10**18
    assert pack([0, 0, 0, count, 0, count]).packs < 0  # rows of 5, one document in each


@pytest.mark.parametrize("packer", NEED_SCIPY)
def test_names_the_extra_where_scipy_is_missing(packer, monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ValueError, match=rf"--packer {packer} needs SciPy: .*\[pack\]"):
        pack([0, 1, 1], packer, 2)
    assert pack([0, 1, 1], "lpfhp").packs == 2


@needs_scipy
def test_least_squares_over_too_many_patterns_is_refused():
    with pytest.raises(ValueError, match="every way to fill a pack of 256, more than 100,000"):
        pack(np.arange(257), "nnlshp")


def test_a_limit_below_one_is_refused_for_documents_in_order():
    with pytest.raises(ValueError, match="--max-per-pack 0: a pack holds 1 document or more"):
        pack_lengths([1, 1], 2, "next-fit", 0)


def test_documents_of_another_histogram_are_refused():
    with pytest.raises(ValueError, match="not those of the histogram that was packed"):
        assign(pack(histogram([3, 5], 8)), np.array([3, 4]))


# ---- the command


@pytest.fixture
def histogram_file(tmp_path):
    def write(content):
        path = tmp_path / "lengths.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_command_prints_rows_and_padding(capsys):
    main(["100", "90", "60", "50", "--max-len", "128"])
    out = capsys.readouterr().out
    assert "60 + 50 = 110 of 128" in out
    assert "lpfhp: 3 rows, no packer needs fewer than 3" in out
    assert "padding: 21.9%, 41.4% with one document a row" in out


def test_command_prints_json(histogram_file, capsys):
    file = histogram_file({"max_len": 8, "counts": [0, 3, 2, 0, 2, 2]})
    main([file, "--max-len", "8", "--packer", "lpfhp", "--max-per-pack", "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.pop("seconds") > 0
    assert found == {
        "packer": "lpfhp",
        "packs": 5,
        "efficiency": 34 / 40,
        "factor": 9 / 5,
        "lower_bound": 5,
    }


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ({"max_len": 2, "counts": [1, 1, 1]}, [], "document of 3 tokens does not fit a row of 2"),
        ({"max_len": 3, "counts": [1, 1, 1]}, ["--max-len", "2"], "split or truncate it before"),
        ({"max_len": 2, "counts": [0, 0]}, [], "the histogram is empty"),
        ({"max_len": 2, "counts": [1, -1]}, [], "-1 documents of length 2"),
        ({"max_len": 2, "counts": [1, 0.5]}, [], "is no histogram: it has to be"),
        ({"max_len": 2}, [], "is no histogram: it has to be"),
        ([1, 2], [], "is no histogram: it has to be"),
        ("counts: 1", [], "is no histogram: it has to be"),
        ({"max_len": 2, "counts": [1]}, ["--max-per-pack", "0"], "--max-per-pack 0: choose 1"),
        ({"max_len": 2, "counts": [1]}, ["--max-len", "0"], "--max-len 0: choose 1 to 4,194,304"),
        ({"max_len": 2, "counts": [1]}, ["--max-len", "4194305"], "--max-len 4194305: choose 1"),
        ({"max_len": 10**30, "counts": [1]}, [], r"lengths.json: max_len 10{30}: choose 1 to"),
        ({"max_len": 2, "counts": [1]}, ["--packer", "wfd"], "invalid choice: 'wfd'"),
        ({"max_len": 2, "counts": [1]}, ["--packer", "next-fit"], "needs the documents in order"),
        ({"max_len": 2, "counts": [1]}, ["7"], "give one folder, one file, or only lengths"),
    ],
)
def test_command_refuses_in_one_line(content, arguments, message, histogram_file):
    with pytest.raises(ValueError, match=message):
        main([histogram_file(content), *arguments])


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("count", [9 * 10**18, 10**30, MOST_TOKENS // 3 + 1])
def test_command_refuses_absurd_counts(packer, count, histogram_file, monkeypatch, capsys):
    file = histogram_file({"max_len": 5, "counts": [0, 0, count]})
    argv = ["packing.py", file, "--packer", packer]
    assert refusal_of(main, argv, monkeypatch, capsys) == (
        f"error: {file}: the histogram has {3 * count:,} tokens, and packers count exactly up to"
        " 9,007,199,254,740,992 (2^53): divide every count by the same number\n"
    )


def test_command_refuses_absurd_lengths(monkeypatch, capsys):
    argv = ["packing.py", "3", str(2**63 + 1)]
    said = refusal_of(main, argv, monkeypatch, capsys)
    assert f"a document of {2**63 + 1} tokens does not fit a row of 1 to 256" in said


def test_command_refuses_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        main([str(tmp_path / "none.json")])
    with pytest.raises(ValueError, match="no token store"):
        main([str(tmp_path)])
