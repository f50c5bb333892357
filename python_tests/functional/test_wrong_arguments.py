"""Rotated operations refuse wrong shapes, dtypes and settings, each by name, and the ring stays usable."""

import functools

import pytest
import torch
from harness import on_ranks
from operation_checks import check_pass
from operations.bundles import BOTH, make_experts, make_head, make_mlp
from operations.layers import make_linear
from reference import chunk, random

from rtp_ext.functional import rotated_experts, rotated_linear_cross_entropy, rotated_mlp


def _linear(rank, ranks, ring):
    """Ranks that need gradients of different parameters."""
    operation = make_linear()
    shards = operation.shards(rank, ranks, ("weight", "bias")[: 1 + rank])
    message = r"fc: the ranks of the ring disagree.* of weight, bias \(True, False\).*\(True, True\).* on rank 1"
    with pytest.raises(ValueError, match=message):
        operation.rotated(shards, operation.inputs("2d", rank, 0), ring=ring, name="fc")


def _mlp(rank, ranks, ring):
    operation = make_mlp()
    shards = operation.shards(rank, ranks)
    x = operation.inputs("2d", rank, 0)[0]
    good = {"ring": ring, "activation": "swiglu", "name": "block.mlp"}

    def call(x=x, up="up", down="down", gate="gate", **options):
        get = {**shards, "wide": random(3, 8, dtype=torch.float64, seed=1)}
        get["swapped"] = chunk(operation.parameters["up"], ranks, 1 - rank)
        get["narrow"] = chunk(random(7, 4, dtype=torch.float64, seed=1), ranks, rank)
        return rotated_mlp(x, get[up], get[down], get.get(gate), **{**good, **options})

    for error, message, wrong in (
        (ValueError, "block.mlp: expected an activation of .*swiglu.*, got 'tanh'", {"activation": "tanh"}),
        (ValueError, "block.mlp: activation gelu expected a gate: False, got one: True", {"activation": "gelu"}),
        (ValueError, "block.mlp: activation swiglu expected a gate: True, got one: False", {"gate": None}),
        (ValueError, "block.mlp: .*biases of both gate and up", {"up_bias": shards["up_bias"]}),
        (ValueError, r"block.mlp: expected an input of 5 features, got shape \(2, 4\)", {"x": x.new_ones(2, 4)}),
        (TypeError, "block.mlp: expected an input of dtype torch.float64, got torch.float32", {"x": x.float()}),
        (TypeError, "block.mlp: expected an input tensor .*got None", {"x": None}),
        (ValueError, "block.mlp: up weight shards do not belong together.*7, 5", {"up": "swapped"}),
        (ValueError, r"block.mlp: expected a whole gate weight of shape \(7, 5\).*\(7, 4\)", {"gate": "narrow"}),
        (ValueError, r"block.mlp: expected a whole down weight of shape \(3, 7\).*\(3, 16\)", {"down": "wide"}),
        (ValueError, r"block.mlp: expected a down weight of 2 dim.*got shape \(\d,\)", {"down": "down_bias"}),
    ):
        with pytest.raises(error, match=message):
            call(**wrong)


def _experts(rank, ranks, ring):
    operation = make_experts()
    shards = operation.shards(rank, ranks)
    x, index, weights = operation.inputs("2d", rank, 0)
    swapped = chunk(operation.parameters["up"], ranks, 1 - rank)
    thin = chunk(random(5, 6, 3, dtype=torch.float64, seed=1), ranks, rank)
    odd = chunk(random(5, 7, 6, dtype=torch.float64, seed=1), ranks, rank)
    for error, message, wrong in (
        (ValueError, "moe: expected an activation of .*swiglu.*, got 'tanh'", {"activation": "tanh"}),
        (IndexError, r"moe: expected an index in \[0, 5\], got -1 to -1", {"index": index.clone().fill_(-1)}),
        (IndexError, r"moe: expected an index in \[0, 5\], got 6 to 6", {"index": index.clone().fill_(6)}),
        (TypeError, "moe: expected an index of integers, got torch.float64", {"index": weights}),
        (TypeError, "moe: expected an index of integers, got torch.bool", {"index": index > 0}),
        (TypeError, "moe: expected weights of floating-point numbers, got torch.int64", {"weights": index}),
        (ValueError, r"moe: expected index and weights of shape \([34], K\), got \(2, 2\)", {"index": index[:2]}),
        (ValueError, r"moe: expected index and weights of .*and \([34], 1\)", {"weights": weights[:, :1]}),
        (ValueError, r"moe: expected an input of 6 features, got shape \([34], 5\)", {"x": x[:, :5]}),
        (TypeError, "moe: expected an input of dtype torch.float64, got torch.float32", {"x": x.float()}),
        (ValueError, "moe: up weight shards do not belong together.*5, 8, 6", {"up": swapped}),
        (ValueError, r"moe: expected a whole down weight of shape \(5, 6, 4\), got \(5, 6, 3\)", {"down": thin}),
        (ValueError, "moe: expected an even number of rows of gate and up, got 7", {"up": odd}),
        (ValueError, "moe: expected a down weight of 3 dimensions, got shape", {"down": shards["down"][0]}),
    ):
        arguments = {"x": x, "index": index, "weights": weights, "up": shards["up"], "down": shards["down"]}
        with pytest.raises(error, match=message):
            rotated_experts(**{**arguments, **wrong}, ring=ring, name="moe")


def _biased(rank, ranks, ring):
    operation = make_experts(biases=BOTH)
    shards = operation.shards(rank, ranks)
    batch = operation.inputs("2d", rank, 0)
    other = {
        name: chunk(random(*shape, dtype=torch.float64, seed=3), ranks, rank)
        for name, shape in (("up_bias", (5, 4)), ("down_bias", (5, 7)), ("more", (9, 6)))
    }
    for message, wrong in (
        (r"moe: expected a whole up bias of shape \(5, 8\), got \(5, 4\)", {"up_bias": other["up_bias"]}),
        (r"moe: expected a whole down bias of shape \(5, 6\), got \(5, 7\)", {"down_bias": other["down_bias"]}),
        (r"moe: expected a whole down bias of shape \(5, 6\), got \(9, 6\)", {"down_bias": other["more"]}),
        (r"moe: expected a down bias of 2 dimensions, got shape", {"down_bias": shards["down_bias"][0]}),
        (r"moe: expected a whole up bias of shape \(5, 6\), got \(5, 8\)", {"transposed": True}),
        ("moe: interleaved expected an activation with a gate, got 'gelu'", {"activation": "gelu"}),
    ):
        given = {name: shards[name] for name in BOTH} | {"interleaved": "activation" in wrong}
        with pytest.raises(ValueError, match=message):
            rotated_experts(*batch, shards["up"], shards["down"], ring=ring, name="moe", **{**given, **wrong})
    mine = {"limit": 1.0 + rank}
    with pytest.raises(ValueError, match=r"the ranks of the ring disagree.*clamped \(1.702, 2.0\) on rank 1"):
        rotated_experts(*batch, shards["up"], shards["down"], ring=ring, activation="clamped_swiglu", **mine)


def _head(rank, ranks, ring):
    operation = make_head()
    shards = operation.shards(rank, ranks)
    x, targets = operation.inputs("2d", rank, 0)
    swapped = chunk(operation.parameters["weight"], ranks, 1 - rank)
    few = chunk(random(9, dtype=torch.float64, seed=1), ranks, rank)
    for error, message, wrong in (
        (IndexError, r"lm_head: expected targets in \[0, 11\) or -100, got 11", {"targets": targets.clamp(min=11)}),
        (IndexError, r"lm_head: expected targets in \[0, 11\) or 3, got -100", {"ignore_index": 3}),
        (TypeError, "lm_head: expected integer targets, got torch.float64", {"targets": targets.double()}),
        (TypeError, "lm_head: expected integer targets, got torch.bool", {"targets": targets > 0}),
        (ValueError, r"lm_head: expected targets of shape \((3|4),\), got \(2,\)", {"targets": targets[:2]}),
        (ValueError, r"lm_head: expected an input of 5 features, got shape \(\d, 4\)", {"x": x[:, :4]}),
        (TypeError, "lm_head: expected an input of dtype torch.float64, got torch.float32", {"x": x.float()}),
        (ValueError, "lm_head: weight shards do not belong together.*11, 5", {"weight": swapped}),
        (ValueError, r"lm_head: expected a whole bias of shape \(11,\), got \(9,\)", {"bias": few}),
        (ValueError, "lm_head: expected a reduction of none, mean, sum, got 'max'", {"reduction": "max"}),
        (ValueError, "lm_head: expected label_smoothing in .*got 1.5", {"label_smoothing": 1.5}),
        (ValueError, "lm_head: expected a positive soft_cap or None, got 0", {"soft_cap": 0.0}),
        (ValueError, "lm_head: expected z_loss >= 0, got -1", {"z_loss": -1.0}),
    ):
        arguments = {"x": x, "weight": shards["weight"], "targets": targets, "bias": shards["bias"], **wrong}
        with pytest.raises(error, match=message):
            rotated_linear_cross_entropy(**arguments, ring=ring, name="lm_head")


REFUSALS = (
    (_linear, make_linear),
    (_mlp, make_mlp),
    (_experts, make_experts),
    (_biased, functools.partial(make_experts, biases=BOTH)),
    (_head, make_head),
)


@on_ranks(2)
def test_wrong_arguments(rank, ranks, ring):
    for refuse, make in REFUSALS:
        refuse(rank, ranks, ring)
        check_pass(make(), ring)
