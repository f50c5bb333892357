"""Divided experts of which there are fewer than ranks, cut along their hidden features, against the plain module in one
process on the batches of all ranks."""

import copy
import dataclasses
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import on_ranks
from hf_models import check_parameters, fill
from models import train
from reference import adamw, assert_same, differs, random
from test_divided_experts import DIMS, TOLERANCE, batch, loss_of, make, mean_loss, same_as, sent_by, total, within
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext import Ring
from rtp_ext.nn import RotatedExperts
from rtp_ext.ring.expert_ring import whole_experts

D = 6
# kind, mesh, sizes, experts, hidden features, capacity: E, E / N below 1, experts missing in a part, features missing on
# ranks and in slices
LAYERS = {
    4: (
        ("mixtral", ("ring", "expert"), (2, 2), 3, 5, None),
        ("mixtral", ("expert", "ring"), (2, 2), 1, 7, None),
        ("gpt_oss", ("ring", "expert"), (2, 2), 5, 3, None),
        ("mixtral", ("expert", "ring"), (4, 1), 3, 2, None),
    ),
    6: (
        ("mixtral", ("ring", "expert"), (3, 2), 2, 7, None),
        ("gpt_oss", ("ring", "expert"), (3, 2), 2, 5, None),
        ("plain", ("expert", "ring"), (2, 3), 2, 4, None),
        ("mixtral", ("expert", "ring"), (2, 3), 3, 7, 2),
    ),
}


class Plain(torch.nn.Module):
    """Stacked experts in three layouts: gate over up, GPT-OSS's, and without a gate, with biases."""

    def __init__(self, kind, count, hidden):
        super().__init__()
        self.kind, self.clamp = kind, (1.702, 7.0)
        up, shapes = "up_proj" if kind == "plain" else "gate_up_proj", {}
        rows = hidden if kind == "plain" else 2 * hidden
        shapes[up] = (count, D, rows) if kind == "gpt_oss" else (count, rows, D)
        shapes[f"{up}_bias"] = (count, rows)
        shapes["down_proj"] = (count, hidden, D) if kind == "gpt_oss" else (count, D, hidden)
        shapes["down_proj_bias"] = (count, D)
        for name, shape in shapes.items():
            if kind != "mixtral" or not name.endswith("bias"):
                self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=torch.float64)))

    def forward(self, x, index, weights):
        up, down = (next(p for n, p in self.named_parameters() if n in names) for names in (UPS, ("down_proj",)))
        count, biases = len(down), {n.split("_")[0]: p for n, p in self.named_parameters() if n.endswith("bias")}
        if self.kind == "gpt_oss":
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        chosen, weights = index.clamp(max=count - 1), weights.where(index < count, 0)
        values = torch.einsum("td,tkod->tko", x, up[chosen])
        if biases:
            values = values + next(biases[key] for key in ("gate", "up") if key in biases)[chosen]
        if self.kind == "plain":
            hidden = torch.nn.functional.silu(values)
        elif self.kind == "mixtral":
            gate, up = values.chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
        else:
            gate, up = values[..., ::2].clamp(max=self.clamp[1]), values[..., 1::2].clamp(-self.clamp[1], self.clamp[1])
            hidden = (up + 1) * gate * torch.sigmoid(self.clamp[0] * gate)
        y = torch.einsum("tko,tkdo->tkd", hidden, down[chosen])
        if biases:
            y = y + biases["down"][chosen]
        return (y * weights.unsqueeze(-1)).sum(1)


UPS = ("gate_up_proj", "up_proj")


def rotated(plain, ring, count, hidden):
    """The same parameters on a ring."""
    activation = "silu" if plain.kind == "plain" else "swiglu"
    layer = RotatedExperts(count, D, hidden, activation=activation, bias=plain.kind != "mixtral", dtype=torch.float64, ring=ring)
    if plain.kind == "gpt_oss":
        import transformers as hf
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        config = hf.GptOssConfig(hidden_size=D, intermediate_size=hidden, num_local_experts=count)
        layer = RotatedExperts.from_module(GptOssExperts(config).double(), ring)
    state = plain.state_dict()
    rtp_ext.init_weights(layer, lambda part: part.load_state_dict(state))
    return layer


def routed(rank, seed, count):
    """Tokens of a rank, none on rank 1, their experts, of which one may be none, and weights."""
    tokens = 0 if rank == 1 else 3 + rank
    x, weights = (random(tokens, size, dtype=torch.float64, seed=seed + 10 * rank + size) for size in (D, 2))
    index = torch.randint(count + 1, (tokens, 2), generator=torch.Generator().manual_seed(seed + rank))
    return x.requires_grad_(), index, weights.requires_grad_()


@on_ranks([4, 6])
def test_of_a_layer(rank, ranks, cases):
    for kind, names, sizes, count, hidden, capacity in LAYERS[ranks]:
        plain = fill(Plain(kind, count, hidden))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        with (
            cases.case(f"{kind} {names} {sizes} {count} experts of {hidden}"),
            Ring(mesh, dims=dataclasses.replace(DIMS, expert_capacity=capacity), timeout=30) as ring,
        ):
            assert not whole_experts(count, ring.experts.places)
            layer = rotated(plain, ring, count, hidden)
            first = next(layer.parameters())
            held = -(-first.shape[2 if kind == "gpt_oss" else 1] // ranks)
            assert first.to_local().numel() <= held * count * D, "hidden features of every expert on every rank"
            optimizers = [adamw(part.parameters(), lr=0.05) for part in (layer, plain)]
            for step in range(3):
                batches = [routed(each, 100 * step, count) for each in range(ranks)]
                outputs = [
                    plain(x, index if capacity is None else within(index, capacity, count), weights)
                    for x, index, weights in batches
                ]
                mine = [part.detach().clone().requires_grad_(part.requires_grad) for part in batches[rank]]
                y = layer(*mine)
                assert_same(y, outputs[rank], TOLERANCE, "output", 1.0)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                total(outputs, ranks).backward()
                total([y], 1).backward()
                for place in (0, 2):
                    assert_same(mine[place].grad, batches[rank][place].grad * ranks, TOLERANCE, "input gradient", 1.0)
                check_parameters(layer, plain, lambda parameter: parameter.grad)
                if step == 0:  # controls: hidden features that belong to others, and a sum that is divided by too few
                    moved = copy.deepcopy(plain)
                    moved.down_proj.data = plain.down_proj.data.roll(1, 1 if kind == "gpt_oss" else 2)
                    if rank != 1:
                        assert differs(y, moved(*batches[rank]), 1e-3)
                    assert differs(layer.down_proj.grad.full_tensor(), 2 * plain.down_proj.grad, 1e-3)
                for optimizer in optimizers:
                    optimizer.step()
                check_parameters(layer, plain)
