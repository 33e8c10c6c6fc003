"""Pseudo-to-Real: stages, the state that is handed over, and runs that change their model."""

import copy
from itertools import pairwise

import pytest
import torch
from conftest import ALL_ON, metrics, read_log
from hypothesis import given
from hypothesis import strategies as st

import config
import pseudo
import train
from model import Transformer, TransformerConfig
from pseudo import ABSENT, Uses, average, handed_over, origin, parse_until, shadow_at, stage
from support.step.optim import Optimizers

SHARED = "--pseudo --pseudo-group 2 --pseudo-until 0.5"
GROWING = "--pseudo --pseudo-layers 2 --pseudo-until 0.5"


def losses(lines):
    return [line["loss"] for line in lines if line["event"] == "train"]


# ---- stages


def test_worked_examples():
    assert stage(6, 6, 2) == (0, 1, 0, 1, 0, 1)
    assert stage(4, 4, 1) == (0, 0, 0, 0)
    assert stage(6, 3, 3) == (0, -1, 2, -1, -1, 5)
    assert stage(6, 2, 1) == (0, -1, -1, -1, -1, 0)
    assert [origin((0, -1, 2, -1, -1, 5), layer) for layer in range(6)] == [0, 0, 2, 2, 5, 5]
    assert [origin((0, 1, 0, 1), layer) for layer in range(4)] == [0, 1, 0, 1]


@given(st.integers(1, 40), st.data())
def test_a_stage_holds_what_it_says(layers, data):
    present = data.draw(st.integers(1, layers))
    group = data.draw(st.sampled_from([n for n in range(1, present + 1) if present % n == 0]))
    owners = stage(layers, present, group)
    there = [owner for owner in owners if owner != ABSENT]
    assert len(owners) == layers and len(there) == present
    assert len(set(there)) == group
    assert {there.count(owner) for owner in there} == {present // group}
    assert all(owners[owner] == owner for owner in there), "an owner uses its own weights"
    assert all(owner <= layer for layer, owner in enumerate(owners)), "and comes first"
    assert owners[0] == 0 and (present == 1 or owners[-1] != ABSENT)
    sources = [origin(owners, layer) for layer in range(layers)]
    counts = [sources.count(owner) for owner in set(there)]
    assert max(counts) - min(counts) <= present // group, "every weight is copied as often"


def test_gpt2_with_one_shared_block_has_a_good_third_of_its_parameters():
    """124.5 and 46.5 million: eleven of twelve blocks of 7,087,872 are not there."""
    counts = []
    for group in (12, 1):
        with torch.device("meta"):
            model = Transformer(TransformerConfig("gpt", 12, 12, 768, 3072, 1024, 50304))
        pseudo.share(model, stage(12, 12, group))
        counts.append(sum(p.numel() for p in model.parameters()))
    assert counts == [124_475_904, 124_475_904 - 11 * 7_087_872] == [124_475_904, 46_509_312]


def settings_of(flags, layers=8):
    return config.build(config.parse(f"--layers {layers} --pseudo {flags}".split()))


def test_shared_weights_part_early_and_new_layers_come_late():
    assert settings_of("").pseudo.until == "0.05"
    assert settings_of("--pseudo-layers 4").pseudo.until == "0.75"
    with pytest.raises(ValueError, match="--pseudo-until : give a share"):
        config.build(config.parse(["--pseudo", "--pseudo-until", ""]))


def test_units_double_on_the_way():
    settings = settings_of("--pseudo-group 1 --pseudo-until 0.1,0.2,0.4")
    seen = [shadow_at(settings, at, None).owners for at in (0, 0.05, 0.1, 0.3, 0.4, 1)]
    real = tuple(range(8))
    assert seen == [stage(8, 8, 1)] * 2 + [stage(8, 8, 2), stage(8, 8, 4), real, real]


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["0.1", "0.1,0.2", "0.3,0.5,0.9"]))
def test_weights_are_never_fewer_than_before(one, other, until):
    settings = settings_of(f"--pseudo-group 1 --pseudo-until {until}")
    before, after = sorted((one, other))
    earlier, later = (len({*shadow_at(settings, at, None).owners}) for at in (before, after))
    assert earlier <= later


@pytest.mark.parametrize(
    "text", ["0", "1", "0.5,0.2", "0.1,0.1", "x", "", "nan", "adaptive:2", "adaptive:"]
)
def test_when_must_make_sense(text):
    with pytest.raises(ValueError, match=r"--pseudo-until .*: give a share between 0 and 1"):
        parse_until(text)


REFUSED = {
    "--pseudo-group 3": "--pseudo-group 3 does not divide 8 layers: choose 1, 2, 4, 8",
    "--pseudo-layers 9": "--pseudo-layers 9 is more than the model's 8 layers: choose 1 to 8",
    "--pseudo-layers 4 --pseudo-group 3": "does not divide 4 layers: choose 1, 2, 4",
    "--pseudo-group 4 --pseudo-until 0.1,0.2,0.3": "0.3 has 3 shares, more than units of 4 can be"
    " doubled in 8 layers: give fewer, or --pseudo-group 1",
    "--pseudo-layers 4 --pseudo-until 0.1,0.2": "more than units of 4 can be doubled in 4 layers",
    "--pseudo-group 4 --pseudo-until 0.1,0.2": "8 layers: give fewer, or --pseudo-group 1 or 2",
    "--pseudo-until 0.1,0.2,0.3,0.4": "more than units of 1 can be doubled in 8 layers: give fewer",
    "--pseudo-layers 4 --pseudo-until adaptive": "layers are added at a share of the budget",
    "--pseudo-until 1.5": "--pseudo-until 1.5: give a share between 0 and 1",
    "--fsdp --pseudo-until adaptive": "adaptive needs whole gradients in one place",
    "--offload --pseudo-until adaptive": "adaptive needs whole gradients in one place",
    "--offload --offload-budget much": "--offload-budget much: write an amount such as 6GiB",
    "--init x.pt --size 124M": "--init and --pseudo exclude each other",
    "--model bert --pseudo-new identity": "--pseudo-new identity needs a GPT",
}


@pytest.mark.parametrize("flags", list(REFUSED))
def test_what_cannot_be_is_refused(flags):
    with pytest.raises(ValueError) as error:
        settings_of(flags)
    assert REFUSED[flags] in str(error.value)


# ---- the state that is handed over


def model_of(owners, seed=0, kind="gpt"):
    torch.manual_seed(seed)
    model = Transformer(TransformerConfig(kind, len(owners), 2, 16, 32, 8, 40))
    pseudo.share(model, owners)
    return model


def a_step(model, optimizers, owners, seed):
    torch.manual_seed(seed)
    tokens = torch.randint(0, 40, (2, 8))
    (model((tokens, tokens.roll(-1, 1), None, None)) / 16).backward()
    average(optimizers.named, owners)
    optimizers.clip_gradients(1.0)
    optimizers.step(0.01)


def optimizers_of(model, kind):
    return Optimizers(dict(model.named_parameters()), kind, 0.1, (0.9, 0.95))


def trained(owners, kind="adamw", steps=3):
    model = model_of(owners)
    optimizers = optimizers_of(model, kind)
    for step in range(steps):
        a_step(model, optimizers, owners, step)
    state = {"model": model.state_dict(), "optimizers": optimizers.state_dict()}
    return model, {**state, "pseudo": pseudo.Shadow(owners)._asdict(), "step": steps}


def logits_of(model):
    return model.logits(torch.arange(16).view(2, 8))


def model_from(state, kind="gpt"):
    owners = tuple(state["pseudo"]["owners"])
    model = model_of(owners, seed=1, kind=kind)
    model.load_state_dict(state["model"])
    return model


STAGES = {"full": stage(8, 8, 1), "units": stage(8, 8, 2), "both": stage(8, 4, 2)}


@pytest.mark.parametrize("owners", [stage(8, 8, 1), stage(8, 8, 4)], ids=["one", "four"])
@pytest.mark.parametrize("policy", pseudo.STATES)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_delinking_preserves_the_function_bitwise(owners, policy, kind):
    model, state = trained(owners, kind)
    real = handed_over(state, tuple(range(8)), policy)
    assert torch.equal(logits_of(model_from(real)), logits_of(model))
    assert real["step"] == state["step"], "what it does not know of stays"
    assert sum(p.numel() for p in model_from(real).parameters()) > sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("owners", list(STAGES.values()), ids=list(STAGES))
def test_no_two_layers_share_memory_afterwards(owners):
    _, state = trained(owners)
    real = handed_over(state, tuple(range(8)), "copy")
    tensors = [t for name, t in real["model"].items() if name.startswith("h.")]
    tensors += [t for kept in real["optimizers"]["state"].values() for t in kept.values()]
    places = [tensor.data_ptr() for tensor in tensors]
    assert len(set(places)) == len(places)


def test_it_is_pure():
    _, state = trained(stage(4, 4, 2))
    before = copy.deepcopy(state)
    handed_over(state, (0, 1, 2, 3), "rescale")
    flat = [torch.utils._pytree.tree_leaves(each) for each in (state, before)]
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*flat, strict=True)
    )


def test_the_worked_example_of_the_state():
    """Two layers of one weight: the second moment doubles, the first and the count stay."""
    _, state = trained((0, 0))
    kept = state["optimizers"]["state"]
    name, copied = "h.0.ln_1.weight", "h.1.ln_1.weight"
    for policy, scale in (("copy", 1), ("rescale", 2)):
        found = handed_over(state, (0, 1), policy)["optimizers"]["state"]
        for mine in (found[name], found[copied]):
            assert torch.equal(mine["exp_avg"], kept[name]["exp_avg"])
            assert torch.equal(mine["exp_avg_sq"], kept[name]["exp_avg_sq"] * scale)
            assert mine["step"] == 3
    reset = handed_over(state, (0, 1), "reset")["optimizers"]["state"]
    assert not any(name.startswith("h.") for name in reset)
    assert all(torch.equal(reset["wte.weight"][k], v) for k, v in kept["wte.weight"].items())


def test_units_that_double_keep_their_place():
    _, state = trained(stage(4, 4, 1))
    twice = handed_over(handed_over(state, stage(4, 4, 2), "copy"), stage(4, 4, 4), "copy")
    once = handed_over(state, stage(4, 4, 4), "copy")
    assert twice["model"].keys() == once["model"].keys()
    assert all(torch.equal(twice["model"][name], once["model"][name]) for name in once["model"])
    scaled = handed_over(handed_over(state, stage(4, 4, 2), "rescale"), (0, 1, 2, 3), "rescale")
    kept = state["optimizers"]["state"]["h.0.ln_1.bias"]["exp_avg_sq"]
    assert torch.allclose(scaled["optimizers"]["state"]["h.3.ln_1.bias"]["exp_avg_sq"], 4 * kept)


@pytest.mark.parametrize("owners", [tuple(range(4)), (0, -1, -1, 3)])
def test_a_stage_after_itself_changes_nothing(owners):
    _, state = trained(owners)
    for policy in pseudo.STATES:
        same = handed_over(state, owners, policy)
        assert same["model"].keys() == state["model"].keys()
        assert all(same["model"][name] is state["model"][name] for name in state["model"])
        assert same["optimizers"]["state"].keys() == state["optimizers"]["state"].keys()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_new_layers_are_copies_of_their_neighbours_or_the_identity(kind):
    owners = stage(6, 3, 3)  # 0 . 2 . . 5
    model, state = trained(owners, kind)
    grown = handed_over(state, tuple(range(6)), "copy")["model"]
    for layer, source in enumerate([0, 0, 2, 2, 5, 5]):
        assert torch.equal(
            grown[f"h.{layer}.mlp.c_fc.weight"], grown[f"h.{source}.mlp.c_fc.weight"]
        )
    assert not torch.equal(grown["h.0.mlp.c_fc.weight"], grown["h.2.mlp.c_fc.weight"])
    neutral = handed_over(state, tuple(range(6)), "copy", "identity")
    assert torch.equal(logits_of(model_from(neutral)), logits_of(model)), "the same function"
    assert torch.equal(neutral["model"]["h.1.attn.c_attn.weight"], grown["h.0.attn.c_attn.weight"])
    names = [name for name in neutral["optimizers"]["state"] if name.startswith("h.1.")]
    assert names and not any("c_proj" in name for name in names)
    assert not torch.equal(
        logits_of(model_from({**state, "model": grown, "pseudo": {"owners": range(6)}})),
        logits_of(model),
    )


# ---- the gradients


@pytest.mark.parametrize("parts", [1, 2])
def test_the_update_of_shared_weights_is_that_of_the_mean_gradient(parts):
    """Worked out by hand on the same model without sharing: its layers' gradients, averaged."""
    owners = stage(4, 4, 2)
    shared = model_of(owners)
    apart = model_of(tuple(range(4)))
    apart.load_state_dict(shared.state_dict())
    tokens = torch.arange(32).view(4, 8) % 40
    for model in (shared, apart):
        for rows in tokens.chunk(parts):
            model((rows, rows.roll(-1, 1), None, None)).backward()
    summed = shared.h[1].mlp.c_fc.weight.grad.clone()
    average(dict(shared.named_parameters()), owners)
    for name, parameter in shared.named_parameters():
        gradient = apart.get_parameter(name).grad
        if name.startswith("h."):
            other = apart.get_parameter(name.replace("h.0.", "h.2.").replace("h.1.", "h.3."))
            gradient = (gradient + other.grad) / 2
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-6), name
    assert torch.allclose(shared.h[1].mlp.c_fc.weight.grad * 2, summed)


def test_the_gradient_of_each_use_is_heard_and_changes_nothing():
    owners = stage(4, 4, 2)
    shared, apart = model_of(owners), model_of(tuple(range(4)))
    apart.load_state_dict(shared.state_dict())
    tokens = torch.arange(32).view(4, 8) % 40
    uses = Uses(owners)

    def plain(layer, block, x, meta):
        return block(x, meta)

    for rows in tokens.chunk(2):
        batch = (rows, rows.roll(-1, 1), None, None)
        apart(batch).backward()
        shared(batch, run_block=uses.run_block(plain)).backward()
    for (layer, name), gradient in uses.gradients.items():
        assert torch.allclose(gradient, apart.h[layer].get_parameter(name).grad, atol=1e-6)
    assert len(uses.gradients) == 4 * 4, "four matrices in each of four layers"
    heard = shared.h[0].mlp.c_fc.weight.grad
    assert torch.allclose(
        heard, sum(uses.gradients[i, "mlp.c_fc.weight"] for i in (0, 2)), atol=1e-6
    )


def test_gradients_are_calm_when_most_correlate_little():
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])  # correlation 0.71
    uses = Uses((0, 0, 0))
    uses.gradients = {(0, "w"): a, (1, "w"): b, (2, "w"): b}  # 0.71 and 1

    def same(tensor):
        return tensor

    assert not uses.are_calm(same, 0.7)
    assert not uses.are_calm(same, 0.9), "one of two is not most"
    assert uses.are_calm(same, 1.1)


# ---- runs


def owners_seen(lines):
    return [tuple(line["owners"]) for line in lines if line["event"] == "stage"]


def test_off_is_absent(run, log_of, monkeypatch):
    plain = metrics(log_of())
    for name in ("stage", "shadow_at", "share", "handed_over", "parse_until", "average"):
        monkeypatch.setattr(pseudo, name, None)  # a call would fail
    assert metrics(run(out="poisoned")) == plain


@pytest.mark.parametrize("base", ["", ALL_ON])
@pytest.mark.parametrize("neutral", ["--pseudo-group 4", "--pseudo-layers 4"])
def test_neutral_is_identity(run, log_of, base, neutral):
    """A unit of all layers, or all layers from the start."""
    assert metrics(run(f"{base} --pseudo {neutral}")) == metrics(log_of(base))


@pytest.mark.parametrize(
    "flags",
    [
        f"{SHARED} {ALL_ON} --checkpoint-activations --dropout 0.1",
        f"{GROWING} {ALL_ON}",
        "--pseudo --pseudo-group 1 --pseudo-until 0.3,0.6 --optimizer adamw",
        f"{SHARED} --model bert --nsp",
    ],
)
def test_resume_before_at_and_after_the_switch_is_exact(run, tmp_path, flags):
    flags = f"{flags} --keep 20 --checkpoint-every 256 --eval-every 0 --tokens 2560"
    whole = run(flags, out="whole")
    assert owners_seen(whole)[-1] == (0, 1, 2, 3)
    switch = [line["step"] for line in whole if line["event"] == "stage"][-1]
    files = sorted((tmp_path / "whole").glob("step-*.pt"))
    steps = [int(file.stem[5:]) for file in files]
    assert {switch} <= {*steps}, "a checkpoint stands right at the switch"
    for last in (steps[steps.index(switch) - 1], switch, steps[steps.index(switch) + 1]):
        folder = tmp_path / f"from-{last}"
        folder.mkdir()
        for name in ("config.json", "log.jsonl"):
            (folder / name).write_bytes((tmp_path / "whole" / name).read_bytes())
        name = f"step-{last:08d}.pt"
        (folder / name).write_bytes((tmp_path / "whole" / name).read_bytes())
        assert train.main(["--resume", "--out", str(folder)]) == 0
        assert metrics(read_log(folder)) == metrics(whole)


def test_the_curve_goes_on_where_layers_get_their_own_weights(run):
    """The first loss of the real model is that of the shadow: nothing jumps."""
    steps = [line for line in run(f"{SHARED} --tokens 20000") if line["event"] == "train"]
    at = next(i for i, line in enumerate(steps) if line["consumed_tokens"] >= 10000)
    jumps = [abs(b["loss"] - a["loss"]) for a, b in pairwise(steps)]
    assert jumps[at] <= max(jumps[at - 10 : at])


def test_what_the_log_says_of_memory(run, capsys):
    lines = run(SHARED)
    (stage_line,) = [line for line in lines if line["event"] == "stage"]
    before, now = stage_line["bytes_before"], stage_line["bytes"]
    block = 4 * (12 * 32 * 32 + 13 * 32)
    assert now["weights"] - before["weights"] == 2 * block
    assert before == lines[0]["bytes"] and before["gradients"] == before["weights"]
    out = capsys.readouterr().out
    assert "layers use the weights of 0 1 2 3" in out and "memory: weights" in out


def test_optimizers_hold_what_they_say(store_dir):
    model = model_of(stage(4, 4, 2))
    for kind in ("adamw", "muon"):
        optimizers = optimizers_of(model, kind)
        a_step(model, optimizers, stage(4, 4, 2), 0)
        state = optimizers.state_dict()["state"].values()
        held = sum(t.nbytes for kept in state for what, t in kept.items() if what != "step")
        assert held == optimizers.memory()["optimizer"]


def test_growing_consumes_the_clock_by_the_layers_that_run(run):
    """Half of the layers, half of the tokens: the budget is reached by as much work as without."""
    steps = [line for line in run(GROWING) if line["event"] == "train"]
    consumed = [b["consumed_tokens"] - a["consumed_tokens"] for a, b in pairwise(steps)]
    assert consumed[0] == 128 and consumed[-1] == 256
    assert steps[-1]["layer_tokens"] == pytest.approx(4 * steps[-1]["consumed_tokens"])


def test_growing_and_dropping_meet(run):
    """Layers 0 and 3 are there at first; neither drops, whatever is dropped later."""
    steps = [line for line in run(f"{GROWING} --ltd --ltd-start 16") if line["event"] == "train"]
    layer_tokens = [b["layer_tokens"] - a["layer_tokens"] for a, b in pairwise(steps)]
    assert layer_tokens[0] == 8 * 2 * 32 and 8 * (2 * 32 + 2 * 16) in layer_tokens


@pytest.mark.parametrize("threshold, ends", [(0.999, True), (-0.999, False)])
def test_adaptive_ends_after_three_calm_checks(run, threshold, ends):
    lines = run(f"--pseudo --pseudo-group 2 --pseudo-until adaptive:{threshold}")
    assert owners_seen(lines) == ([(0, 1, 2, 3)] if ends else [])
    if ends:
        (line,) = [line for line in lines if line["event"] == "stage"]
        assert line["step"] == pseudo.CALM


def test_adaptive_goes_on_where_it_was(run, tmp_path):
    flags = (
        "--pseudo --pseudo-group 2 --pseudo-until adaptive:0.999 --keep 20 --checkpoint-every 256"
    )
    whole = run(flags, out="whole")
    for file in sorted((tmp_path / "whole").glob("step-*.pt"))[2:]:
        file.unlink()  # two checks of three were made
    (tmp_path / "whole/best.pt").unlink(missing_ok=True)
    assert train.main(["--resume", "--out", "whole"]) == 0
    assert metrics(read_log(tmp_path / "whole")) == metrics(whole)


def test_adaptive_does_not_depend_on_micro_batches(run):
    flags = "--pseudo --pseudo-group 2 --pseudo-until adaptive:0.6 --lr 1e-3"
    whole, parts = run(flags, out="whole"), run(f"{flags} --micro-batch-size 2", out="parts")
    assert owners_seen(whole) == owners_seen(parts)
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-4)


def test_a_shadow_is_evaluated_and_sampled_like_any_run(run, tmp_path, capsys):
    import evaluate
    import sample

    for flags in (SHARED, GROWING):
        out = flags.split()[1][9:]
        run(f"{flags} --keep 20", out=out)
        first = sorted((tmp_path / out).glob("step-*.pt"))[0]
        for path in (str(first), "last"):
            evaluate.main([out, "--checkpoint", path, "--device", "cpu"])
            sample.main([out, "--checkpoint", path, "--tokens", "5"])
    assert "bits per byte" in capsys.readouterr().out


def test_a_checkpoint_of_another_kind_of_run_is_refused(run, tmp_path):
    for mine, other, was in (("plain", "shared", "with"), ("shared", "plain", "without")):
        if not (tmp_path / "plain").exists():
            run(out="plain")
            run(SHARED, out="shared")
        folder = tmp_path / f"mixed-{mine}"
        folder.mkdir()
        for name in ("config.json", "log.jsonl"):
            (folder / name).write_bytes((tmp_path / mine / name).read_bytes())
        for file in (tmp_path / other).glob("step-*.pt"):
            (folder / file.name).write_bytes(file.read_bytes())
        with pytest.raises(ValueError, match=f"is of a run {was} --pseudo"):
            train.main(["--resume", "--out", str(folder)])
    with pytest.raises(ValueError, match="--pseudo differs from --no-pseudo, with which the run"):
        train.main(["--resume", "--out", str(tmp_path / "plain"), "--pseudo"])
