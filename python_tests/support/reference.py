"""The reference of the tests: the plain torch module in one process, computed in float64.

Every rank has its own local batch. Gradients of parameters are averaged over the ranks, so the reference is the plain
module on the concatenated batch with `loss = mean over ranks of the local loss`; its input gradient times the number
of ranks is that of the local losses.

A comparison measures the largest error against the largest magnitude of the reference:

    float64   1e-10
    float32   1e-5
    bfloat16  2**-7: a result of one rotated operation is summed in float32 and rounded at most twice, each time by at
              most 2**-8 of its magnitude (bfloat16 has 8 significant bits). The inputs are exact: they are rounded to
              bfloat16 before the reference sees them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from shards import AdamW
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}

# AdamW over five steps. In bfloat16 each step rounds the parameter once (2**-8 of its magnitude) and takes an update of
# about one learning rate that is known to ten roundings (gradient, both moments, both denominators).
LEARNING_RATE = 0.05
STEPS = 5


def adamw(parameters: Any, lr: float = LEARNING_RATE, stock: bool = False) -> torch.optim.AdamW:
    """Fused, and on shards unless `stock`: see shards.py."""
    given = list(parameters)
    kinds = ([p for p in given if isinstance(p, DTensor) == sharded] for sharded in (True, False))  # no step takes both
    groups = [{"params": kind} for kind in kinds if kind]
    make = torch.optim.AdamW if stock else AdamW
    return make(groups, lr=lr, eps=1e-8, weight_decay=0.01, fused=True)


def trained_tolerance(dtype: torch.dtype, magnitude: float) -> float:
    """The tolerance, relative to the largest parameter, of parameters after STEPS steps of `adamw`."""
    if dtype != torch.bfloat16:
        return TOLERANCE[dtype]
    return STEPS * (2.0**-8 + 10 * 2.0**-8 * LEARNING_RATE / magnitude)


def chunk(tensor: Tensor, ranks: int, rank: int, dim: int = 0) -> Tensor:
    """The shard of `rank`: ceil(extent / ranks) rows each, the last shards smaller or empty."""
    size = -(-tensor.size(dim) // ranks)
    start = min(rank * size, tensor.size(dim))
    return tensor.narrow(dim, start, min(size, tensor.size(dim) - start))


def random(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers that are the same on every rank, and exact in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor; every rank of its mesh must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wholes(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The values of whole tensors, as copies without autograd; every rank of their meshes must call this.

    One gather over each dimension of a mesh collects all tensors that are cut along the same dimensions of it; `full`
    needs one for each, with 1 ms on every rank. `full` gathers tensors with other placements than shards.
    """
    given = [None if tensor is None else tensor.detach() for tensor in tensors]
    found = [tensor if tensor is None or isinstance(tensor, DTensor) else tensor.clone() for tensor in given]
    together: dict[tuple[Any, tuple[int, ...], torch.dtype], list[int]] = {}
    for number, tensor in enumerate(given):
        if isinstance(tensor, DTensor):
            placed = tensor.placements
            cuts = [dim for dim, placement in enumerate(placed) if not isinstance(placement, Replicate)]
            cuts.sort(key=lambda dim: isinstance(placed[dim], _StridedShard))  # as they were made: strided ones last
            if not cuts:
                found[number] = tensor.to_local().clone()
            elif all(isinstance(placed[dim], (Shard, _StridedShard)) for dim in cuts):
                together.setdefault((tensor.device_mesh, tuple(cuts), tensor.dtype), []).append(number)
            else:
                found[number] = tensor.full_tensor().clone()
    for (mesh, cuts, _), numbers in together.items():
        own = tuple(mesh.get_local_rank(dim) for dim in cuts)
        shapes = {  # by place along the cuts: those of its shards
            at: [_cut_shape(given[number], cuts, at) for number in numbers]
            for at in product(*(range(mesh.size(dim)) for dim in cuts))
        }
        for number, shape in zip(numbers, shapes[own], strict=True):
            assert local(given[number]).shape == shape, f"expected a shard {shape}, got {local(given[number]).shape}"
        sizes = {at: [shape.numel() for shape in each] for at, each in shapes.items()}
        rows = torch.cat([local(given[number]).reshape(-1) for number in numbers])
        rows = torch.cat([rows, rows.new_zeros(max(map(sum, sizes.values())) - rows.numel())])
        for dim in reversed(cuts):
            others = [torch.empty_like(rows) for _ in range(mesh.size(dim))]
            dist.all_gather(others, rows, group=mesh.get_group(dim))
            rows = torch.stack(others)
        pieces = {at: rows[at][: sum(sizes[at])].split(sizes[at]) for at in shapes}
        for place, number in enumerate(numbers):
            parts = {at: pieces[at][place].view(shapes[at][place]) for at in shapes}
            for dim in reversed(cuts):
                row: dict[tuple[int, ...], list[Tensor]] = {}
                for at, part in parts.items():  # in order
                    row.setdefault(at[:-1], []).append(part)
                parts = {at: torch.cat(each, given[number].placements[dim].dim) for at, each in row.items()}
            found[number] = parts[()]
    return found


def _cut_shape(tensor: DTensor, cuts: tuple[int, ...], at: tuple[int, ...]) -> torch.Size:
    part = torch.empty(tensor.shape, device="meta")
    for dim, place in zip(cuts, at, strict=True):
        part = chunk(part, tensor.device_mesh.size(dim), place, tensor.placements[dim].dim)
    return part.shape


def whole_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """By name; see `wholes`."""
    named = dict(module.named_parameters())
    return dict(zip(named, wholes(named.values()), strict=True))


def whole_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """By name, None where there is none; see `wholes`."""
    named = dict(module.named_parameters())
    return dict(zip(named, wholes(p.grad for p in named.values()), strict=True))


def own_part(tensor: DTensor, whole: Tensor) -> Tensor:
    """Returns the part of `whole` that this rank should hold of `tensor`."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def assert_same(
    actual: Tensor | None, expected: Tensor | None, tolerance: float, what: str, scale: float | None = None
) -> None:
    """Raises AssertionError where `actual` differs from `expected` by more than `tolerance` times `scale`.

    Args:
        scale: max |expected| if not given.
    """
    if expected is None:
        assert actual is None, f"{what}: expected None, got a tensor of shape {tuple(actual.shape)}"
        return
    assert actual is not None, f"{what}: expected a tensor, got None"
    assert actual.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    if expected.numel() == 0:
        return
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.detach().to(wide), expected.detach().to(wide)
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    scale = expected.abs().max().item() if scale is None else scale
    error = (actual - expected).abs().max().item()
    assert error <= tolerance * scale, f"{what}: error {error:.3g} exceeds {tolerance:.3g} of {scale:.3g}"


def differs(actual: Tensor | None, expected: Tensor | None, tolerance: float) -> bool:
    """Whether `assert_same` raises: for controls that must fail."""
    try:
        assert_same(actual, expected, tolerance, "control")
    except AssertionError:
        return True
    return False


def training_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole parameters and whole states of the optimizer, copied, by name. Every rank of the meshes must call this."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters():
        found[name] = parameter
        found |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    return dict(zip(found, wholes(found.values()), strict=True))


def unequal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Returns the names of tensors that differ in any bit, or that only one of the two has."""
    odd = set(actual) ^ set(expected)

    def same(a: Tensor, b: Tensor) -> bool:
        return a.dtype == b.dtype and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (a, b)))

    return sorted(odd | {name for name in set(actual) - odd if not same(actual[name], expected[name])})


def one_bit_off(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """For controls: yields copies of `state`; in each the last number of one tensor is the next larger number."""
    copies = []
    for name, value in state.items():
        if value.numel():
            value = value.clone()
            value.view(-1)[-1] = torch.nextafter(value.view(-1)[-1], torch.tensor(torch.inf, dtype=value.dtype))
            copies.append({**state, name: value})
    return copies


def double_copy(module: nn.Module) -> nn.Module:
    """The same module with the same values in float64, for the reference."""
    return copy.deepcopy(module).double()


def reference_pass(
    module: nn.Module, inputs: Sequence[Tensor], loss: Callable[[Tensor, int], Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Runs the plain `module` on all local batches and leaves the averaged gradients in its parameters.

    Args:
        module: in float64.
        inputs: of every rank; floating ones are detached, and get gradients.
        loss: `loss(output, rank)`, the local loss of a rank.

    Returns:
        The outputs and the gradients of the local losses with respect to the inputs, by rank.
    """
    leaves = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = [module(x) for x in leaves]
    total = sum(loss(y, rank) for rank, y in enumerate(outputs)) / len(inputs)
    total.backward()
    gradients = [x.grad * len(inputs) if x.is_floating_point() and x.grad is not None else None for x in leaves]
    return [y.detach() for y in outputs], gradients
