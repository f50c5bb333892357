"""Replicas of rings with features that have special rules: recurrent layers, Flyweight, the fused loss head, weights
that rank 0 broadcasts, bfloat16."""

import copy

import torch
from harness import on_ranks
from hf_models import make
from reference import assert_same, differs, full, local, random, whole_gradients, whole_parameters
from replica_models import DIMS, EXACT, VOCABULARY, Tiny, adamw, all_losses, batch_loss, replicated
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext
from rtp_ext.outer import AllReduce, ZeroOuter


class Around(nn.Module):
    """An embedding, a layer [..., 7] -> [..., 5], a head."""

    def __init__(self, inner, pick=lambda y: y):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(VOCABULARY, 7), inner, nn.Linear(5, VOCABULARY)
        self.pick = pick
        self.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number) * 0.4)

    def forward(self, ids):
        return self.head(self.pick(self.inner(self.embed(ids))))


def trains(cases, what, model, plain, ranks, rank, loss=batch_loss, tolerance=EXACT):
    optimizer, reference = adamw(model), adamw(plain)
    initial = copy.deepcopy(plain)
    for step in range(2):
        optimizer.zero_grad(), reference.zero_grad()
        loss(model, rank, step).backward()
        (sum(loss(plain, other, step) for other in range(ranks)) / ranks).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain)]
        optimizer.step(), reference.step()
        with cases.case(f"{what}: norm of step {step}"):
            assert_same(full(norms[0]), norms[1], tolerance, "the norm")
    with cases.case(what):
        for (name, parameter), other, before in zip(
            whole_parameters(model).items(), plain.parameters(), initial.parameters(), strict=True
        ):
            assert_same(parameter, other, tolerance, name)
            assert differs(other, before, 1e-3), f"control: {name} has not changed"


def _recurrent(rank, ranks, cases, policy):
    def make_one():
        return Around(nn.LSTM(7, 5, batch_first=True), lambda y: y[0])

    model = replicated((2, 2), model=make_one(), outer=policy())
    trains(cases, f"LSTM, {policy.__name__}", model, make_one(), ranks, rank)


def _flyweight(rank, ranks, cases, policy):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ring"))
    ring = rtp_ext.Ring(mesh, dims=DIMS, timeout=30.0)
    model = Around(nn.Linear(7, 5))
    model.inner = rtp_ext.nn.Flyweight(model.inner, ring, shard_dims={"weight": 0, "bias": 0})
    rtp_ext.fully_rotate(model, mesh=ring, outer=policy())
    trains(cases, f"Flyweight, {policy.__name__}", model, Around(nn.Linear(7, 5)), ranks, rank)


def _fused_head(rank, ranks, cases, policy):
    def loss(model, place, step):
        ids = torch.randint(5, (2, 6), generator=torch.Generator().manual_seed(100 * place + step))
        return model(input_ids=ids, labels=ids).loss

    torch.manual_seed(0)
    plain = make("gpt2").double().eval()
    model = replicated((2, 2), model=copy.deepcopy(plain), loss_head="fused", outer=policy())
    # transformers computes the plain model's loss in float32
    trains(cases, f"fused head, {policy.__name__}", model, plain, ranks, rank, loss, 1e-5)


def _broadcast(rank, ranks, cases, policy):
    model, plain = replicated((2, 2), outer=policy()), Tiny()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5).add_(0.1)
    batch_loss(model, rank, 0)  # rotated parameters have been gathered before
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, plain.state_dict() if rank == 0 else {}, options=options)
    with cases.case(f"broadcast, {policy.__name__}"):
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(parameter), other, 0.0, name)
        batch_loss(model, rank, 0).backward()
        all_losses(plain, ranks, 0, 1 / ranks).backward()
        for name, expected in whole_gradients(plain).items():
            assert_same(whole_gradients(model)[name], expected, EXACT, name)


def _bfloat16(rank, ranks, cases):
    """The same values are rounded as in a plain model; sums over the ring and the replicas are not."""
    exact = Tiny(torch.bfloat16).double()
    all_losses(exact, ranks, 0, 1 / ranks).backward()
    plain = Tiny(torch.bfloat16)
    for other in range(ranks):
        (batch_loss(plain, other, 0) / ranks).backward()

    def errors(found):
        return {name: ((found[name].double() - p.grad).norm() / p.grad.norm()).item() for name, p in wanted}

    wanted = list(exact.named_parameters())
    theirs, allowed = errors(whole_gradients(plain)), 2.0**-8
    for policy in (AllReduce, ZeroOuter):
        with cases.case(f"bfloat16, {policy.__name__}"):
            model = replicated((2, 2), model=Tiny(torch.bfloat16), outer=policy())
            batch_loss(model, rank, 0).backward()
            for name, error in errors(whole_gradients(model)).items():
                assert error <= theirs[name] + allowed / 2, f"{name}: {error}, plain {theirs[name]}"
    with cases.case("control: gradients that are rounded once more"):
        coarse = {name: (g.double() * (1 + allowed)) for name, g in whole_gradients(plain).items()}
        assert any(error > theirs[name] + allowed / 2 for name, error in errors(coarse).items())
    with cases.case("bfloat16 that float32 parameters travel in"):
        model = replicated((2, 2), model=Tiny(torch.float32), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        batch_loss(model, rank, 0).backward()
        for name, parameter in model.named_parameters():
            gradient = local(parameter.grad)
            rounded = gradient.numel() > 1 and (gradient == gradient.bfloat16().float()).all()
            assert not rounded, f"{name} was rounded"


@on_ranks(4)
def test_four_ranks(rank, ranks, cases):
    for policy in (AllReduce, ZeroOuter):
        for part in (_recurrent, _flyweight, _fused_head, _broadcast):
            part(rank, ranks, cases, policy)
    _bfloat16(rank, ranks, cases)
