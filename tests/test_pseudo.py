"""Pseudo-to-Real: stages, the state passed to the next stage, and runs that change their model."""

import copy
import re
import shutil
import weakref
from itertools import pairwise

import pytest
import torch
from conftest import ALL_ON, at_step, losses_of, metrics, read_log, refusal
from hypothesis import given
from hypothesis import strategies as st
from small_batches import loss_of, plain_rows, small_model

import config
import evaluate
import pseudo
import sample
import train
from pseudo import ABSENT, average, hand_over, origin, owners_at, stage
from support.optim import Optimizers
from support.weights import initial_model

REAL = tuple(range(8))


# ---- stages


def test_stages_equal_worked_examples():
    assert stage(6, 6, 2) == (0, 1, 0, 1, 0, 1)
    assert stage(4, 4, 1) == (0, 0, 0, 0)
    assert stage(6, 3, 3) == (0, -1, 2, -1, -1, 5)
    assert stage(6, 2, 1) == (0, -1, -1, -1, -1, 0)
    assert [origin((0, -1, 2, -1, -1, 5), layer) for layer in range(6)] == [0, 0, 2, 2, 5, 5]
    assert [origin((0, 1, 0, 1), layer) for layer in range(4)] == [0, 1, 0, 1]


@given(st.integers(1, 40), st.data())
def test_stages_share_evenly_among_the_present_layers(layers, data):
    present = data.draw(st.integers(1, layers))
    group = data.draw(st.sampled_from([n for n in range(1, present + 1) if present % n == 0]))
    owners = stage(layers, present, group)
    there = [owner for owner in owners if owner != ABSENT]
    assert (len(owners), len(there), len(set(there))) == (layers, present, group)
    assert {there.count(owner) for owner in there} == {present // group}
    assert all(owners[owner] == owner for owner in there), "an owner uses its own weights"
    assert all(owner <= layer for layer, owner in enumerate(owners)), "and is the first to use them"
    assert owners[0] == 0 and (present == 1 or owners[-1] != ABSENT)
    sources = [origin(owners, layer) for layer in range(layers)]
    counts = [sources.count(owner) for owner in set(there)]
    assert max(counts) - min(counts) <= present // group, "all weights are copied equally often"


def settings_of(flags):
    return config.build(config.parse(f"--layers 8 --pseudo {flags}".split()))


def test_units_double_at_every_fraction_of_pseudo_until():
    settings = settings_of("--pseudo-group 1 --pseudo-until 0.1,0.2,0.4")
    seen = [owners_at(settings.pseudo, settings.model.layers, at / 20) for at in range(21)]
    stages = [stage(8, 8, 1), stage(8, 8, 2), stage(8, 8, 4), REAL]
    assert seen == stages[:1] * 2 + stages[1:2] * 2 + stages[2:3] * 4 + stages[3:] * 13
    assert settings_of("").pseudo.until == "0.05", "the default for shared weights"
    assert settings_of("--pseudo-layers 4").pseudo.until == "0.75", "the default for new layers"


REFUSED = {
    "--pseudo-group 3": "--pseudo-group 3 .*: choose 1, 2, 4, 8$",
    "--pseudo-layers 9": "--pseudo-layers 9",
    "--pseudo-group 4 --pseudo-until 0.1,0.2": "--pseudo-until .*: choose 1, 2$",
    "--pseudo-until 0.5,0.2": "--pseudo-until",
}


def test_impossible_stages_are_refused():
    for flags, says in REFUSED.items():
        assert re.search(says, refusal(settings_of, flags))


# ---- the state for the next stage


def model_of(owners, seed=0):
    return pseudo.share_weights(small_model(blocks=len(owners), seed=seed), owners)


def a_step(model, optimizers, owners, seed):
    torch.manual_seed(seed)
    tokens = torch.randint(0, 40, (2, 8))
    (loss_of(model, plain_rows(tokens)) / 16).backward()
    average(optimizers.named, owners)
    optimizers.clip_gradients(1.0)
    optimizers.step(0.01)


def train_model(owners, kind="adamw"):
    model = model_of(owners)
    optimizers = Optimizers(dict(model.named_parameters()), kind, 0.1, 0.95)
    for step in range(3):
        a_step(model, optimizers, owners, step)
    state = {"model": model.state_dict(), "optimizers": optimizers.state_dict()}
    return model, {**state, "pseudo": {"owners": owners}, "step": 3}


def logits_of(model):
    return model.logits(model(torch.arange(16).view(2, 8)))


def model_from(state):
    owners = tuple(state["pseudo"]["owners"])
    model = model_of(owners, seed=1)
    model.load_state_dict(state["model"])
    return model


@pytest.mark.parametrize("policy", pseudo.STATES)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_unsharing_weights_keeps_the_models_function_bitwise(policy, kind):
    model, state = train_model(stage(8, 8, 4), kind)
    before = copy.deepcopy(state)
    real = hand_over(state, REAL, policy)
    assert torch.equal(logits_of(model_from(real)), logits_of(model))
    assert real["step"] == state["step"], "other entries are kept"
    tensors = [t for name, t in real["model"].items() if name.startswith("h.")]
    tensors += [t for kept in real["optimizers"]["state"].values() for t in kept.values()]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors), "no memory is shared"
    torch.testing.assert_close(state, before, rtol=0, atol=0, msg="the input was changed")


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_a_shadow_is_built_without_the_weights_that_it_shares(kind):
    settings = config.build(config.parse(f"--model {kind} --layers 6 --width 16".split()))
    shape, owners = config.transformer_config(settings, 40), stage(6, 6, 2)
    whole, small = (initial_model(shape, settings, kept=kept) for kept in (None, {*owners}))
    assert len({*small.h}) == 3, "two that are kept, and one for the draws of all others"
    wanted, built = (pseudo.share_weights(m, owners).state_dict() for m in (whole, small))
    torch.testing.assert_close(built, wanted, rtol=0, atol=0)


def test_optimizer_state_equals_the_worked_example():
    """Two layers share a weight. The second moment doubles; the first and the step count stay."""
    _, state = train_model((0, 0))
    kept = state["optimizers"]["state"]
    of_one = kept["h.0.ln_1.weight"]
    for policy, scale in (("copy", 1), ("rescale", 2)):
        after = hand_over(state, (0, 1), policy)["optimizers"]["state"]
        for moments in (after["h.0.ln_1.weight"], after["h.1.ln_1.weight"]):
            assert torch.equal(moments["exp_avg"], of_one["exp_avg"])
            assert torch.equal(moments["exp_avg_sq"], of_one["exp_avg_sq"] * scale)
            assert moments["step"] == 3
    reset = hand_over(state, (0, 1), "reset")["optimizers"]["state"]
    assert not any(name.startswith("h.") for name in reset)
    assert all(torch.equal(reset["wte.weight"][k], v) for k, v in kept["wte.weight"].items())


def test_doubling_twice_equals_quadrupling():
    _, state = train_model(stage(4, 4, 1))
    for policy in ("copy", "rescale"):
        twice = hand_over(hand_over(state, stage(4, 4, 2), policy), stage(4, 4, 4), policy)
        once = hand_over(state, stage(4, 4, 4), policy)
        torch.testing.assert_close(twice["model"], once["model"], rtol=0, atol=0)
        states = (each["optimizers"]["state"]["h.3.ln_1.bias"] for each in (twice, once))
        torch.testing.assert_close(*states, rtol=1e-6, atol=0)


def test_new_layers_are_copies_of_their_neighbours():
    model, state = train_model(stage(6, 3, 3))  # 0 . 2 . . 5
    grown = hand_over(state, tuple(range(6)), "copy")["model"]
    for layer, source in enumerate((0, 0, 2, 2, 5, 5)):
        name = "h.{}.mlp.c_fc.weight".format
        assert torch.equal(grown[name(layer)], state["model"][name(source)])
    copied = {**state, "model": grown, "pseudo": {"owners": range(6)}}
    assert not torch.equal(logits_of(model_from(copied)), logits_of(model))


# ---- the gradients


def test_shared_weights_get_the_mean_gradient_of_their_layers():
    """The mean is computed on a model without sharing, over two micro-batches."""
    owners = stage(4, 4, 2)
    shared = model_of(owners)
    apart = model_of(tuple(range(4)))
    apart.load_state_dict(shared.state_dict())
    tokens = torch.arange(32).view(4, 8) % 40
    for rows in tokens.chunk(2):
        for model in (apart, shared):
            loss_of(model, plain_rows(rows)).backward()
    summed = shared.h[1].mlp.c_fc.weight.grad.clone()
    average(dict(shared.named_parameters()), owners)
    assert torch.allclose(shared.h[1].mlp.c_fc.weight.grad * 2, summed)
    for name, parameter in shared.named_parameters():
        gradient = apart.get_parameter(name).grad
        if name.startswith("h."):
            other = apart.get_parameter(name.replace("h.0.", "h.2.").replace("h.1.", "h.3."))
            gradient = (gradient + other.grad) / 2
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-6), name


# ---- runs; test_train.py says that off is absent and neutral is identity

SHORT = "--eval-every 0 --tokens 1536 --checkpoint-every 0"
SAVED = "--checkpoint-every 256 --keep 20"
SHARED = f"--pseudo --pseudo-group 2 {ALL_ON} --checkpoint-activations --dropout 0.1"
PARTING = f"{SHARED} --pseudo-until 0.5 {SAVED}"
GROWING = f"--pseudo --pseudo-layers 2 --pseudo-until 0.5 --ltd --ltd-start 16 {SAVED}"
DOUBLING = f"--pseudo --pseudo-group 1 --pseudo-until 0.3,0.6 {SAVED} --optimizer adamw"
write_sample = sample.continue_text


@pytest.fixture
def folder_of(no_sample_or_report, finished):
    """The folder of a run of about six steps, made once: folder_of("--ltd")"""
    return lambda flags="": finished(f"{SHORT} {flags}")


SWITCHES = [(PARTING, (-1, 0, 1)), (GROWING, (0,)), (f"{DOUBLING} --model bert --nsp", (-1, 0))]


@pytest.mark.parametrize("flags, places", SWITCHES, ids=["shared", "growing", "doubling"])
def test_resuming_before_at_and_after_the_switch_is_exact(folder_of, tmp_path, flags, places):
    whole = folder_of(flags)
    switch = read_log(whole, "stage")[-1]
    assert switch["owners"] == [0, 1, 2, 3]
    files = sorted(file.name for file in whole.glob("step-*.pt"))
    at = files.index(f"step-{switch['step']:08d}.pt")  # the checkpoint right at the switch
    for place in places:
        again = tmp_path / f"from{place}"
        again.mkdir()
        for name in ("config.json", "log.jsonl", files[at + place]):
            shutil.copy(whole / name, again)
        assert train.main(["--resume", "--out", str(again)]) == 0
        assert metrics(read_log(again)) == metrics(read_log(whole))


def test_the_loss_does_not_jump_when_layers_get_their_own_weights(folder_of):
    """The first loss of the real model equals, bit for bit, that of a shadow that continues."""
    real, shadow = folder_of(PARTING), folder_of(f"{SHARED} --pseudo-until 0.75")
    (stage_line,) = read_log(real, "stage")
    losses, expected, after = losses_of(real), losses_of(shadow), stage_line["step"] + 1
    assert losses[:after] == expected[:after] and losses[after] != expected[after]
    block = 4 * (12 * 32 * 32 + 13 * 32)
    assert stage_line["bytes"]["weights"] - stage_line["bytes_before"]["weights"] == 2 * block


def test_tokens_count_by_the_share_of_layers_that_are_present(folder_of):
    """With half of the layers, half of the tokens are consumed, so a budget means the same work.

    At first only layers 0 and 3 are present, which never drop tokens.
    """
    steps = read_log(folder_of(GROWING), "train")
    counts = [line["layer_tokens"] for line in steps]
    assert counts == [4 * line["consumed_tokens"] for line in steps]
    worked = [after - before for before, after in pairwise([0, *counts])]
    assert worked[0] == 8 * 2 * 32 and 8 * (2 * 32 + 2 * 16) in worked


def test_a_shadow_is_evaluated_and_sampled_like_any_model(folder_of, capsys, monkeypatch):
    monkeypatch.setattr(sample, "continue_text", write_sample)
    for run in (folder_of(PARTING), folder_of(GROWING)):
        shadow = str(min(run.glob("step-*.pt")))
        evaluate.main([str(run), "--checkpoint", shadow, "--device", "cpu", "--tokens", "500"])
        assert "bits per byte" in capsys.readouterr().out
        sample.main([str(run), "--checkpoint", shadow, "--prompt", "", "--tokens", "5"])


def test_a_stage_frees_the_model_of_the_one_before(run, monkeypatch):
    """Otherwise the weights and optimizer state of the first stage would stay to the end."""
    made, alive, assemble = [], [], train.assemble

    def noting(*args, **more):
        trainer = assemble(*args, **more)
        made.append(weakref.ref(trainer.optimizers))
        return trainer

    monkeypatch.setattr(train, "assemble", noting)
    with at_step(8, lambda: alive.extend(optimizers() is not None for optimizers in made)):
        run(f"{SHORT} --pseudo --pseudo-layers 2 --pseudo-until 0.5")
    assert alive == [False, True]
