"""The sizes by name have the published counts of parameters; FLOPs of a row, worked by hand.

That these are what torch counts is in tests/test_flops.py.

python -m pytest tests/test_sizes.py
"""

from model import TransformerConfig
from support.step.sizes import SIZES, flops_of_row, parameter_count, with_defaults


def test_published_parameter_counts():
    layers, heads, width, T, *_ = SIZES["124M"]
    gpt2 = TransformerConfig("gpt", layers, heads, width, 4 * width, T, 50257)
    assert parameter_count(gpt2) == 124_439_808
    # BERT-base as published with its masked-token head: 109,514,298; less the two rows of token
    # types, of which the model keeps one, inside its positions.
    layers, heads, width, T, *_ = SIZES["bert-base"]
    shape = TransformerConfig("bert", layers, heads, width, 4 * width, T, 30522)
    assert parameter_count(shape) == 109_514_298 - 2 * width


def test_flops_of_a_row_worked_example():
    config = TransformerConfig("gpt", 2, 1, 4, 16, 8, 10)
    assert flops_of_row(config, [8, 4], 8) == 17_664
    assert flops_of_row(config, [8, 8], 8) > 17_664 > flops_of_row(config, [8, 0], 8)


def test_only_a_new_nano_gpt_has_a_head_and_a_beta2_of_its_own():
    init, told = {"model.init": "a.safetensors"}, {"model.tied": True, "optim.beta2": 0.5}
    others = [(0.95, {"model.size": "124M"}), (0.95, init), (0.999, {"model.model": "bert"})]
    for beta2, given in [(0.99, {}), (0.5, told), *others]:
        found = with_defaults(given)
        assert (found["model.tied"], found["optim.beta2"]) == (given != {}, beta2), given
