"""Load nanoGPT's model and make its training step, so that bench/step.py can compare it with ours.

nanoGPT is not part of this project: clone https://github.com/karpathy/nanoGPT, and give its folder
to bench/step.py --nanogpt.
"""

import contextlib
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from model import Batch, TransformerConfig

PREFIX = "transformer."  # its parameter names begin with this
WEIGHT_DECAY, BETAS, LR, GRAD_CLIP = 0.1, (0.9, 0.95), 1e-4, 1.0  # as in its train.py, except LR


def load(folder: Path) -> ModuleType:
    """Import the folder's model.py as `nanogpt_model`, because ours is called model.py too.

    Raises: ValueError if the folder has no model.py
    """
    path = folder / "model.py"
    if not path.is_file():
        raise ValueError(f"--nanogpt {folder} has no model.py: give the folder of a nanoGPT clone")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, like: "TransformerConfig", device: str) -> nn.Module:
    """Build nanoGPT's model with the dimensions of ours."""
    nanogpt = load(folder)
    shape = nanogpt.GPTConfig(
        block_size=like.seq_len,
        vocab_size=like.vocab_size,
        n_layer=like.layers,
        n_head=like.heads,
        n_embd=like.width,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its number of parameters
        return nanogpt.GPT(shape).to(device)


def step_of(model: nn.Module, batches: "list[Batch]", compiled: bool) -> Callable:
    """Return a function that steps as nanoGPT's train.py: forward, backward, clip, fused AdamW."""
    device = batches[0].tokens.device.type
    with contextlib.redirect_stdout(io.StringIO()):
        # "cuda" on every device: it only asks for fused AdamW, which by now exists on CPUs too
        optimizer = model.configure_optimizers(WEIGHT_DECAY, LR, BETAS, "cuda")
    run = torch.compile(model) if compiled else model

    def make() -> None:
        for batch in batches:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = run(batch.tokens, batch.targets)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return make


def check_same_function(ours: nn.Module, theirs: nn.Module, batch: "Batch") -> None:
    """Check that with nanoGPT's weights both models have the same loss and gradients.

    Args:   ours  with the exact GELU, as in nanoGPT
            batch of plain rows
    Raises: ValueError naming what differs most
    """
    with torch.no_grad():  # at initialisation all logits are near 0, and any two losses are close
        for parameter in theirs.parameters():
            parameter.mul_(4 if parameter.dim() >= 2 else 1)
    weights = {name.removeprefix(PREFIX): value for name, value in theirs.named_parameters()}
    ours.load_state_dict({name: weights[name] for name in ours.state_dict()})
    loss = ours.loss(ours(*batch.inputs), batch) / batch.targets.numel()
    expected_loss = theirs(batch.tokens, batch.targets)[1]
    errors = {"the loss": (loss - expected_loss).norm() / expected_loss.norm()}
    gradients = torch.autograd.grad(loss, [ours.get_parameter(name) for name in weights])
    expected = torch.autograd.grad(expected_loss, list(theirs.parameters()))
    for name, value, other in zip(weights, gradients, expected, strict=True):
        errors[f"the gradient of {name}"] = (value - other).norm() / other.norm()
    worst = max(errors, key=errors.get)
    if not errors[worst] < 1e-4:  # in fp32; with tanh GELU instead of the exact one it is 7e-4
        raise ValueError(f"--nanogpt: {worst} differs from ours by {errors[worst]:.1e} of its norm")
