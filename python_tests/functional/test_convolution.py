"""Rotated convolutions: memory formats, copies, constructors. test_operations.py tests their results."""

import copy

import pytest
import torch
from harness import on_ranks
from operation_checks import EXACT, loss
from operations.layers import CONVOLUTIONS, CONVOLVED, make_convolution
from reference import assert_same, chunk, full, local, reference_pass
from torch import nn

from rtp_ext.functional import rotated_convolution
from rtp_ext.nn import RotatedConv1d


@on_ranks(3)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_memory_formats_and_copies(rank, ranks, ring, transport):
    """A deep copy in another memory format computes and accumulates the same, in the format of its input."""
    operation = make_convolution("2d, head, whole groups, tail")
    for in_place in (False, True):
        ring.in_place = in_place
        module = operation.module(ring)
        expected = nn.Conv2d(10, 15, 2, groups=5, bias=False, dtype=torch.float64)
        expected.load_state_dict(operation.parameters)
        first, second = ([operation.inputs("batched", r, seed)[0] for r in range(ranks)] for seed in (10, 50))
        twin = copy.deepcopy(module).to(memory_format=torch.channels_last)
        for inputs in (first, second):
            reference_pass(expected, inputs, loss)
        loss(twin(first[rank]), rank).backward()
        y = twin(second[rank].to(memory_format=torch.channels_last))
        assert y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()
        loss(y, rank).backward()
        right = chunk(expected.weight.grad, ranks, rank)
        assert_same(local(twin.weight.grad), right, EXACT, "weight gradient")
        assert module.weight.grad is None
        for each in (module, twin):
            assert_same(local(each.weight), chunk(operation.parameters["weight"], ranks, rank), 0.0, "at home")


@on_ranks(3)
def test_constructor_is_that_of_the_plain_module(ranks, ring):
    for shape, (inputs, outputs, kernel, options, extents) in CONVOLUTIONS.items():
        kind, rotated = CONVOLVED[len(extents)]
        torch.manual_seed(3)
        plain = kind(inputs, outputs, kernel, **options)
        torch.manual_seed(3)
        module = rotated(inputs, outputs, kernel, **options, ring=ring)
        assert isinstance(module, kind) and list(module.state_dict()) == list(plain.state_dict())
        assert_same(full(module.weight), plain.weight, 0.0, shape)
        torch.manual_seed(3)
        module.reset_parameters()
        assert_same(full(module.weight), plain.weight, 0.0, f"{shape} after reset_parameters")
        assert repr(module).startswith(f"Rotated{repr(plain)[:-1]}") and f"ring={ranks}" in repr(module)
        assert rotated(inputs, outputs, kernel, **options, device="meta", ring=ring).weight.is_meta
        x = torch.zeros(1, inputs, *extents)
        for bad in (x[0, 0], x[:, :1], x.unsqueeze(0)):
            if bad.shape != x.shape:
                with pytest.raises(ValueError, match=rf"{inputs}.*got"):
                    module(bad)
    with pytest.raises(ValueError, match="at least as large as the kernel"):
        RotatedConv1d(2, 3, 4, ring=ring)(torch.zeros(1, 2, 3))
    with pytest.raises(TypeError, match=r"float32.*float64"):
        RotatedConv1d(2, 3, 1, ring=ring)(torch.zeros(1, 2, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match="expected a Conv1d, got a Conv2d"):
        RotatedConv1d.from_module(nn.Conv2d(1, 1, 1), ring)
    weight = torch.zeros(2, 2, 3)
    for options, text in (
        ({"groups": 4}, "groups that divide"),
        ({"padding": "all"}, "'same', 'valid'"),
        ({"padding": "same", "stride": 2}, "stride 1"),
        ({"padding": (1, 1)}, r"padding of one or 1 integers >= 0, got \(1, 1\)"),
        ({"stride": 0}, "stride"),
        ({"padding_mode": "mirror"}, "mirror"),
    ):
        channels = 2 * options.get("groups", 1)
        with pytest.raises(ValueError, match=text):
            rotated_convolution(torch.zeros(1, channels, 8), weight, ring=ring, **options)
    with pytest.raises(ValueError, match="3, 4 or 5 dimensions"):
        rotated_convolution(torch.zeros(1, 2), torch.zeros(2, 2), ring=ring)
