"""Tensor parallelism under rotation with context parallelism, with modules that joined later, with tables that stay
whole; and what ranks of tensor parallelism may not differ in."""

import pytest
import test_context_parallel as context
import torch
from harness import on_ranks
from reference import adamw, assert_same, differs, full, random
from tensor_models import (
    EXACT,
    VOCABULARY,
    Tiny,
    batch_loss,
    batch_number,
    replicated_activations,
    rotated,
    sequence_parallel,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rtp_ext
from rtp_ext import RotationDims

NAMES = ("ring", "tp")


def assert_gradients(model, plain, what):
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        found, expected = (None if p.grad is None else p.grad.to_dense() for p in (parameter, other))
        assert_same(None if found is None else full(found), expected, EXACT, f"{what}: {name}")


def _context(rank, ranks, cases):
    """The ring is the ranks of one sequence; each of them has its heads on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    sequence, alone = context.Sequence(mesh.get_group("cp"), [0, 7, 12]), context.Sequence(None, [0, 12])
    plain, model = context.make_model(), context.make_model()
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "mlp.0")}
    plan |= {"out": RowwiseParallel(), "mlp.2": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    rtp_ext.fully_rotate(model, mesh=mesh, dims=RotationDims(ring="cp"), timeout=60.0)
    ours, theirs = adamw(model.parameters(), lr=0.01), adamw(plain.parameters(), lr=0.01)
    tokens = 2 * context.SEQUENCE
    for step in range(3):
        ours.zero_grad(), theirs.zero_grad()
        (context.total_loss(model, *context.batch(0, step), sequence) * 2 / tokens).backward()
        (context.total_loss(plain, *context.batch(0, step), alone) / tokens).backward()
        with cases.case(f"context and tensor parallelism: step {step}"):
            assert_gradients(model, plain, f"step {step}")
        ours.step(), theirs.step()


def _adapters(rank, ranks, cases):
    """Whole on every rank, right where ranks of tensor parallelism see the same, else refused."""
    for target, plan, alike in (
        ("head", replicated_activations, True),
        ("block.attention.o", sequence_parallel, True),
        ("mix", sequence_parallel, True),
        ("block.mlp.1", replicated_activations, False),
    ):
        model, mesh = rotated((2, 2), NAMES, plan(RowwiseParallel))
        plain = Tiny()
        for each in (model, plain):
            layer = each.get_submodule(target)
            layer.adapter = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
            layer.register_forward_hook(_scaled)
        batch, batches = batch_number(mesh)
        with cases.case(f"an adapter of {target}, {plan.__name__}"):
            if alike:
                batch_loss(model, batch, 0).backward()
                (sum(batch_loss(plain, number, 0) for number in range(batches)) / batches).backward()
                assert_gradients(model, plain, target)
            else:
                loss = batch_loss(model, batch, 0)
                with pytest.raises(ValueError, match=r"shape \(\), which every rank .* not the same on them"):
                    loss.backward()


def _scaled(module, _, y):
    return y * module.adapter


class Table(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 7, **options)
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, VOCABULARY)
        self.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number) * 0.7)

    def forward(self, ids):
        return self.down(nn.functional.gelu(self.up(self.embed(ids))))


def _tables(rank, ranks, cases):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with cases.case(f"a table with {options}"):
            model, mesh = rotated((2, 2), NAMES, plan, model=Table(**options))
            plain, untouched = Table(**options), Table(**options)
            batch, batches = batch_number(mesh)
            for step in range(2):
                model.zero_grad(), plain.zero_grad()
                batch_loss(model, batch, step).backward()
                _at_once(plain, batches, step).backward()
                assert_gradients(model, plain, f"step {step}")
                assert_same(full(model.embed.weight), plain.embed.weight, EXACT, "the table")
            if "max_norm" in options:
                assert differs(plain.embed.weight, untouched.embed.weight, 1e-3), "control: no row was too long"
    with (
        cases.case("a sparse table"),
        pytest.raises(ValueError, match=r"embed \(Embedding\): sparse .*tensor parallel"),
    ):
        rotated((2, 2), NAMES, plan, model=Table(sparse=True))


def _at_once(plain, batches, step):
    """The loss of all batches in one forward: a table's rows depend on all ids."""
    draws = [torch.Generator().manual_seed(1000 * number + step) for number in range(batches)]
    ids = torch.cat([torch.randint(VOCABULARY, (2, 6), generator=draw) for draw in draws])
    return nn.functional.cross_entropy(plain(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _refused(rank, ranks, cases):
    with cases.case("a divide factor that differs"):
        model, mesh = rotated((2, 2), NAMES, replicated_activations(RowwiseParallel))
        with pytest.raises(ValueError, match=r"same factor on every rank.*\[1.0, 2.0\]"):
            rtp_ext.set_gradient_divide_factor(model, 1 + mesh.get_local_rank("tp"))
    for first in ("replicas", "tensor parallelism"):
        with cases.case(f"one name for two dimensions, {first} first"):
            names = (f"x{len(first)}", "ring")
            plan = replicated_activations(RowwiseParallel)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            cut = parallelize_module(Tiny(), mesh[names[0]], plan)
            models = [(Tiny(), RotationDims(replicate=names[0])), (cut, RotationDims())]
            (one, dims), (other, others) = models if first == "replicas" else models[::-1]
            rtp_ext.fully_rotate(one, mesh=mesh, dims=dims, timeout=30.0)
            before = dict(other.named_parameters())
            with pytest.raises(
                ValueError, match=f"one meaning for each dimension.*{names[0]}.*with {first} in another"
            ):
                rtp_ext.fully_rotate(other, mesh=mesh, dims=others, timeout=30.0)
            assert all(before[name] is parameter for name, parameter in other.named_parameters())


@on_ranks(4)
def test_four_ranks(rank, ranks, cases):
    for part in (_refused, _context, _adapters, _tables):
        part(rank, ranks, cases)
