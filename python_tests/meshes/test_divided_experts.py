"""Experts divided over one dimension of a mesh and rotated over another, against the plain model in one process on the
batches of all ranks."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from hf_models import check_parameters, fill
from models import train
from reference import adamw, assert_same, differs, random
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext import Ring, RotationDims
from rtp_ext.nn import RotatedMoE

D, H, E = 6, 4, 12
TOLERANCE = 1e-6
DIMS = RotationDims(ring="ring", expert="expert")
# names and sizes of the dimensions of a mesh, by number of ranks
MESHES = {
    4: (
        (("expert", "ring"), (2, 2)),
        (("ring", "expert"), (2, 2)),
        (("expert", "ring"), (4, 1)),
        (("expert", "ring"), (1, 4)),
    ),
    6: ((("expert", "ring"), (2, 3)),),
    8: ((("replicas", "ring", "expert"), (2, 2, 2)),),
}


class PlainExperts(torch.nn.Module):
    """Stacked experts, token by token."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(E, 2 * H, D, dtype=torch.float64))
        self.down_proj = torch.nn.Parameter(torch.empty(E, D, H, dtype=torch.float64))

    def forward(self, x, index, weights):
        rows = []
        for token, chosen, shares in zip(x, index, weights, strict=True):
            y = torch.zeros_like(token)
            for expert, share in zip(chosen.tolist(), shares, strict=True):
                if expert < E:
                    gate, up = (self.gate_up_proj[expert] @ token).chunk(2)
                    y = y + share * (self.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
            rows.append(y)
        # An expert that nobody chose has a gradient of zeros.
        unused = 0 * (self.gate_up_proj.sum() + self.down_proj.sum())
        return torch.stack(rows) + unused if rows else x * weights.sum() + unused


def routed(rank, kind, seed=0):
    """Tokens of a rank, their experts and weights."""
    tokens = {"empty": 0 if rank % 2 else 3, "nowhere": 0}.get(kind, 2 + 3 * rank)
    x = random(tokens, D, dtype=torch.float64, seed=seed + 10 * rank)
    weights = random(tokens, 3, dtype=torch.float64, seed=seed + 10 * rank + 1)
    generator = torch.Generator().manual_seed(seed + rank)
    index = torch.rand(tokens, E, generator=generator).argsort(1)[:, :3]
    if kind == "crowded":
        index = torch.full_like(index, 5)  # one expert alone
    elif kind == "dropped":
        index[:, 1:] = E  # no expert
        index[::2, 0] = 1
    elif kind == "skewed":
        index = index % (1 + rank)  # nobody chooses most of the experts
    return x.requires_grad_(), index, weights.requires_grad_()


KINDS = ("usual", "empty", "nowhere", "crowded", "dropped", "skewed")


def total(outputs, ranks):
    return sum((y * random(*y.shape, dtype=torch.float64, seed=7)).sum() for y in outputs) / ranks


def as_meshes(ranks):
    for names, sizes in MESHES[ranks]:
        yield f"{names} {sizes}", init_device_mesh("cpu", sizes, mesh_dim_names=names)


@on_ranks([4, 6])
def test_of_a_layer(rank, ranks, cases):
    plain = fill(PlainExperts())
    for label, mesh in as_meshes(ranks):
        with Ring(mesh, dims=DIMS, timeout=30) as ring:
            plain = copy.deepcopy(plain)
            layer = rtp_ext.nn.RotatedExperts(E, D, H, dtype=torch.float64, ring=ring)
            rtp_ext.init_weights(layer, lambda part: part.load_state_dict(plain.state_dict()))
            optimizers = [adamw(part.parameters(), lr=0.05) for part in (layer, plain)]
            for step, kind in enumerate(KINDS):
                with cases.case(f"{label} {kind}"):
                    batches = [routed(each, kind, 100 * step) for each in range(ranks)]
                    outputs = [plain(*batch) for batch in batches]
                    mine = [part.detach().clone().requires_grad_(part.requires_grad) for part in batches[rank]]
                    y = layer(*mine)
                    assert_same(y, outputs[rank], TOLERANCE, "output", scale=1.0)
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    total(outputs, ranks).backward()
                    total([y], 1).backward()
                    for place in (0, 2):
                        assert_same(mine[place].grad, batches[rank][place].grad * ranks, TOLERANCE, "input gradient", 1.0)
                    check_parameters(layer, plain, lambda parameter: parameter.grad)
                    for optimizer in optimizers:
                        optimizer.step()
                    check_parameters(layer, plain)
