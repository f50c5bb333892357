"""The plain experts that are the reference of rotated ones. test_operations.py tests the results of rotated experts."""

from dataclasses import replace

import torch
from operation_checks import plain_results, rotated_result
from operations.bundles import BOTH, ROUTINGS, make_experts
from reference import assert_same

import rtp_ext


def test_the_plain_experts_are_those_of_transformers():
    """The reference of this file, and the gradient of the router's weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=6, intermediate_size=4, num_local_experts=5, num_experts_per_tok=3)
    config._experts_implementation = "eager"
    for routing in (each for each in ROUTINGS if each != "nobody"):
        operation = make_experts(choices=3, routing=routing)
        module = MixtralExperts(config).double()
        with torch.no_grad():
            module.gate_up_proj.copy_(operation.parameters["up"])
            module.down_proj.copy_(operation.parameters["down"])
        expected = replace(
            operation,
            plain=lambda p, batch, module=module: torch.func.functional_call(
                module, {"gate_up_proj": p["up"], "down_proj": p["down"]}, tuple(batch)
            ),
        )
        ours, theirs = (plain_results(each, 2, "2d", 3) for each in (operation, expected))
        for mine, right in zip(ours, theirs, strict=True):
            assert_same(mine.output, right.output, 1e-12, "output")
            for name, gradient in right.gradients.items():
                assert_same(mine.gradients[name], gradient, 1e-12, name)
            for number in (0, 2):
                assert_same(mine.input_gradients[number], right.input_gradients[number], 1e-12, f"input {number}")


def test_an_expert_without_tokens_adds_no_bias():
    ring = rtp_ext.Ring.emulated(1)
    operation = make_experts(routing="first", biases=BOTH)
    shards = operation.shards(0, 1)
    actual = rotated_result(operation, ring, "2d", 10, shards)
    for name in BOTH:
        assert actual.gradients[name][0].abs().min() > 0
        assert_same(actual.gradients[name][1:], torch.zeros_like(shards[name][1:]), 0.0, name)
