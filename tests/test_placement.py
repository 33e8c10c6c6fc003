"""What leaves the device for a byte budget: worked by hand, and as properties of any sizes."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import config
from model import Transformer, TransformerConfig
from offload import budget_bytes, placement_for
from support import runtime
from support.runtime import Runtime
from support.sizes import empty_model
from support.step.placement import Away, Part, Placement, parts_of, place

NOTHING, STATE, GRADIENTS, WEIGHTS = Away
MIB = 2**20


def blocks(n, numel=1000, state=8):
    return tuple(Part(f"h.{i}", (i,), numel, state * numel, 10) for i in range(n))


THREE = (Part("outside", (), 500, 4000, 5), *blocks(3))


def kinds_of(placement):
    return [part.away for part in placement.parts]


def away(budget, **more):
    """A letter each for the outside and the three blocks."""
    return "".join("NSGW"[kind] for kind in kinds_of(place(THREE, budget, "fp32", **more)))


def block(away, layers=(0,), numel=1):
    return Part("h.0", layers, numel, 8 * numel, 0, away)


def test_worked_example():
    """16 bytes for each of 3,535 parameters; 8,000 of state, 4,000 of gradients in a block.

    Two more gradients of the outside are 4,000. The first gradients that leave put 8,000 on
    their way, and so do the first weights.
    """
    assert away(60_560) == "NNNN"
    assert away(60_559) == away(52_560) == "NNSN"
    assert away(52_559) == away(44_560) == "NSSN"
    assert away(44_559) == away(36_560) == "NSSS"
    assert away(36_559) == away(32_560) == "NGGG", "less would hold no less"
    assert away(32_559) == away(28_560) == "NWWW"
    assert away(28_559) == away(24_560) == "SWWW"
    assert away(24_559) == away(22_560) == "GWWW"
    with pytest.raises(ValueError, match=r"--offload-budget 22\.03 KiB.* 1MiB"):
        place(THREE, 22_559, "fp32")


def test_the_walk_at_the_head_of_offload_py():
    """Every number of it."""
    model = empty_model(TransformerConfig("gpt", 6, 4, 128, 512, 256, 4160, "rope"))
    parts = parts_of(model, muon=True)
    whole, state, weights = (place(parts, b, "fp32") for b in (2**30, 25.5 * MIB, 18 * MIB))
    held = [round(placement.device_bytes / MIB, 2) for placement in (whole, state, weights)]
    assert held == [25.84, 25.09, 17.59]
    assert parts[3].numel == 196_608 and parts[3].numel * 4 == parts[3].state_bytes == 0.75 * MIB
    assert kinds_of(state) == [NOTHING] * 3 + [STATE] + [NOTHING] * 3
    assert kinds_of(weights) == [NOTHING, GRADIENTS, *[WEIGHTS] * 3, GRADIENTS, GRADIENTS]
    for placement in (state, weights):
        assert placement.on_host(placement.parts[3]) == 2.25 * MIB
        assert placement.slot_bytes == 0.75 * MIB
    assert state.traffic(1024, 2)[:2] == (0.75 * MIB, 0.75 * MIB)
    assert weights.traffic(1024, 2)[:2] == (9 * MIB, 9 * MIB)
    assert [weights.fetches(part, 2) for part in parts[2:5]] == [3, 4, 2]


@pytest.mark.parametrize(
    ("dtype", "on_device", "outside", "narrow"),
    [  # with nothing, state, gradients and weights away, by AdamW: from the equations
        ("fp32", (4 + 4 + 8, 4 + 4, 4, 0), (4 + 4 + 8, 4 + 4, 4), 0),
        ("bf16", (4 + 2 + 4 + 8, 4 + 2 + 4, 2, 0), (4 + 4 + 8, 4 + 4, 4 + 2), 2),
    ],
)
def test_bytes_of_a_parameter(dtype, on_device, outside, narrow):
    blocks = [block(kind) for kind in Away]
    rest = [Part("outside", (), 1, 8, 0, kind) for kind in Away if kind < WEIGHTS]
    placement = Placement((), dtype, 0)
    assert tuple(map(placement.on_device, blocks)) == on_device
    assert tuple(map(placement.on_device, rest)) == outside
    on_host = (0, 4 + 4 + 8, 4 + 4 + 8 + narrow, 4 + 4 + 8 + narrow)
    assert tuple(map(placement.on_host, blocks)) == on_host


def test_gradients_of_a_shared_block_stay_until_its_last_use():
    shared = block(WEIGHTS, (0, 3), 1000)
    assert Placement((shared,), "fp32", 0).device_bytes == 4000 + 4 * 4000


@st.composite
def sizes(draw):
    """Any model: blocks of several sizes, some shared, and the outside."""
    numbers = st.tuples(st.integers(1, 10**7), st.integers(0, 10**4))
    more = st.tuples(numbers, st.sampled_from([4, 8]), st.sampled_from([1, 1, 1, 2, 3]))
    numel, small = draw(numbers)
    parts, layer = [Part("outside", (), 10 * numel, 80 * numel, small)], 0
    for (numel, small), state, uses in draw(st.lists(more, min_size=1, max_size=7)):
        layers = tuple(range(layer, layer + uses))
        parts.append(Part(f"h.{layer}", layers, numel, state * numel, small))
        layer += uses
    return tuple(parts)


DTYPE = st.sampled_from(["fp32", "bf16"])


def placed(parts, budget, dtype):
    try:
        return place(parts, budget, dtype)
    except ValueError as error:
        return int(re.search(r"works is (\d+)MiB", str(error))[1])


@given(sizes(), DTYPE, st.floats(0, 1.1), st.floats(0, 1.1))
def test_any_placement_holds_its_budget_in_the_order_of_leaving(parts, dtype, share, more):
    """A refusal names the smallest budget that works, and a larger one never moves more."""
    whole = place(parts, 2**60, dtype).device_bytes
    share, more = sorted((share, more))
    placement, roomier = (placed(parts, int(s * whole), dtype) for s in (share, more))
    if isinstance(placement, int):
        least = placement
        assert placed(parts, least * MIB, dtype).device_bytes <= least * MIB
        assert least == 1 or placed(parts, (least - 1) * MIB, dtype) == least
        return
    assert placement.device_bytes <= share * whole
    assert share < 1 or not any(kinds_of(placement))
    assert all(b <= a for a, b in zip(kinds_of(placement), kinds_of(roomier), strict=True))
    outside, *kinds = kinds_of(placement)
    assert max(kinds) - min(kinds) <= 1, "gradients leave when no state is left, and so on"
    assert outside == NOTHING or set(kinds) == {WEIGHTS}
    assert outside < WEIGHTS
    middle = (len(kinds) - 1) / 2
    left = [abs(i - middle) for i, kind in enumerate(kinds) if kind == max(kinds)]
    stayed = [abs(i - middle) for i, kind in enumerate(kinds) if kind < max(kinds)]
    assert not stayed or max(left) <= min(stayed)


def test_with_several_ranks_only_state_leaves():
    assert away(36_560, kinds=(STATE,)) == "NSSS"
    with pytest.raises(ValueError, match="with several ranks only optimizer state leaves"):
        away(24_000, kinds=(STATE,))


def test_a_host_that_is_too_small_is_refused():
    """One block of 1,000 parameters away: 16,000 bytes, and two slots for its gradients."""
    assert away(52_560, host_bytes=24_000) == "NNSN"
    for more in ({"host_bytes": 23_999}, {"host_bytes": 24_000, "ranks_here": 2}):
        with pytest.raises(ValueError, match=r"--offload-budget .* of host memory"):
            away(52_560, **more)
    assert away(60_560, host_bytes=0) == "NNNN"


def test_a_run_is_placed_by_its_flags_and_by_what_is_free(monkeypatch):
    """Before its model takes memory. A flag may give the host more than is free now."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig("gpt", 4, 2, 64, 2048, 24, 40))
    here = Runtime(0, 1, torch.device("cpu"), torch.float32, "", 24 * 10**6, host_free=10**6)

    def placement(flags, runtime=here):
        settings = config.build(config.parse(["--offload", *flags.split()]))
        return placement_for(settings, model, runtime)

    budget, given = "--offload-budget 12MB", "--offload-host-memory"
    with pytest.raises(ValueError, match=given):
        placement(budget)
    placed = placement(f"{budget} {given} 20MB")
    assert 10**6 < placed.host_bytes < 20 * 10**6 and any(kinds_of(placed))
    assert placement(f"{given} 20MB") == placed, "auto: half of what is free"
    assert not any(kinds_of(placement("--offload-budget 1GiB")))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert placement(f"{budget} {given} {placed.host_bytes * 2}B") == placed


def test_memory_of_the_host_is_read(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  9 kB\nMemAvailable:     12 kB\n")
    assert runtime.host_free(str(file)) == 12 * 1024
    assert runtime.host_free(str(tmp_path / "nowhere")) is None


def test_amounts_of_memory():
    amounts = {"6GiB": 6 * 2**30, "800MB": 800_000_000, "1.5KiB": 1536, "7": 7, "2 TB": 2 * 10**12}
    assert {text: budget_bytes(text) for text in amounts} == amounts
    assert budget_bytes("auto", 3000) == 1500
    for text in ("", "6G", "much", "-1GB", "0GiB", "1e9", "6 gib", "6GiBs", "GiB"):
        with pytest.raises(ValueError, match=f"--offload-budget {text}: write an amount"):
            budget_bytes(text)
    with pytest.raises(ValueError, match="--offload-budget auto"):
        budget_bytes("auto")  # and nobody knows what is free


def test_sizes_of_a_model_count_a_shared_block_once():
    with torch.device("meta"):
        model = Transformer(TransformerConfig("gpt", 4, 2, 16, 32, 24, 40))
        model.h[3] = model.h[0]
    parts = {part.name: part for part in parts_of(model, muon=True)}
    assert list(parts) == ["outside", "h.0", "h.1", "h.2"]
    matrices, small = 16 * 48 + 16 * 16 + 2 * 16 * 32, 4 * 16 + 48 + 16 + 32 + 16
    assert parts["h.0"] == Part("h.0", (0, 3), matrices, 4 * matrices, small)
    assert parts["outside"] == Part("outside", (), 64 * 16, 8 * 64 * 16, 32)
    assert {part.state_bytes / part.numel for part in parts_of(model, muon=False)} == {8}
    total = sum(part.numel + part.small for part in parts.values())
    assert total == sum(p.numel() for p in model.parameters())


def test_traffic_worked_example():
    costs = [(0, 0, 0, 0), (400, 400, 0, 100), (800, 400, 0, 100), (800, 400, 4000, 100)]
    for kind, cost in zip(Away, costs, strict=True):
        placement = Placement((block(kind, numel=100),), "fp32", 0)
        assert placement.traffic(micro_batch_tokens=10, micro_batches=2) == cost


def test_blocks_stay_where_a_pass_begins_with_the_one_that_the_last_pass_ended_with():
    """2 (3 + 3) uses of 400 bytes, of which 3 follow on a use of the same block.

    A shared block is fetched for each of its layers: of 8 uses 2 follow on one of the last layer,
    and 1 on one of the first.
    """
    three = tuple(block(WEIGHTS, (layer,), 100) for layer in range(3))
    placement = Placement(three, "fp32", 0)
    assert [placement.fetches(part, 2) for part in three] == [3, 4, 2]
    assert placement.traffic(10, 2).to_device == 3600
    shared = Placement((block(WEIGHTS, (0, 2), 100),), "bf16", 0)
    assert shared.traffic(10, 2) == (400, 1000, 8000, 100)
