"""Models whose shards stay on the host: on a CPU ring, where offload has no effect, and on a simulated device."""

import contextlib
import copy
import itertools

import pytest
import torch
from reference import assert_same, differs, full, local, random, whole_gradients
from replica_models import DIMS, EXACT, Tiny, adamw, all_losses, batch_loss, replicated, step_on
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.functional import rotated_flyweight
from rtp_ext.outer import ZeroOuter
from rtp_ext.ring import cpu_offload, ring
from rtp_ext.ring.autograd import offloaded_shard_of


class Negated(cpu_offload.HostMemory):
    """A memory that stores every number negated, so a read without a copy has the wrong sign; and data on its way to it
    is NaN until a wait. AdamW and clipping treat both signs the same."""

    filled = fetched = waited = 0

    def keep(self, shard):
        return -shard.detach()

    def pinned(self, local):
        return local

    def fill(self, place, local):
        self.filled += 1
        place.copy_(-local)

    def fetch(self, value):
        self.fetched += 1
        value, arriving = value.clone(), torch.full_like(value, float("nan"))

        def wait():
            self.waited += 1
            arriving.copy_(-value)

        return arriving, wait


@contextlib.contextmanager
def made_up():
    """Rings of CPUs with offload use a memory of their own as their device's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "host_memory", lambda policy, device: Negated(device, policy.pin_memory))
        yield


def negated(values):
    return {name: None if value is None else -value for name, value in values.items()}


def assert_given_back(model):
    """No shard has memory on the device between operations."""
    for name, parameter in model.named_parameters():
        stand_in = offloaded_shard_of(parameter)._stand_in
        assert stand_in is None or stand_in.untyped_storage().nbytes() == 0, name


def offload_cases(rank, ranks, cases):
    accepted(rank, ranks, cases)
    refused_cases(rank, ranks, cases)
    with made_up():
        for shape, factor in (((1, 4), None), ((1, 4), 1), ((2, 2), 1)):
            trains(rank, ranks, cases, shape, factor)
        others(rank, ranks, cases)


def accepted(rank, ranks, cases):
    with cases.case("a CPU ring is its own host"):
        models = [replicated((2, 2), offload_policy=policy) for policy in (None, CPUOffloadPolicy())]
        found = []
        for model in models:
            optimizer = adamw(model)
            step_on(model, optimizer, [lambda each=model: batch_loss(each, rank, 0)])
            batch_loss(model, rank, 1).backward()
            found.append(whole_gradients(model))
            assert rtp_ext.ring_of(model).host_memory is None and rtp_ext.ring_of(model).prefetch == 1
        for name, gradient in found[0].items():
            assert torch.equal(found[1][name], gradient), name


def refused_cases(rank, ranks, cases):
    def refused(what, match, act, error=ValueError):
        with cases.case(what), pytest.raises(error, match=match):
            act()

    class Mine(OffloadPolicy):
        pass

    cpu = CPUOffloadPolicy()
    for policy in (True, "cpu", CPUOffloadPolicy, Mine()):
        refused(
            f"{policy}", "offload_policy to be a CPU", lambda p=policy: replicated((2, 2), offload_policy=p), TypeError
        )
    with_cpu = {"offload_policy": cpu}
    refused("in place", "with in_place=True.*in_place=False", lambda: replicated((2, 2), in_place=True, **with_cpu))
    zero = lambda: replicated((2, 2), outer=ZeroOuter(), **with_cpu)  # noqa: E731
    refused("ZeroOuter", r"with ZeroOuter.*outer.AllReduce\(\)", zero)
    emulated = lambda: rtp_ext.fully_rotate(nn.Linear(4, 4), mesh=rtp_ext.Ring.emulated(2), **with_cpu)  # noqa: E731
    refused("emulated", "an emulated ring", emulated)
    table = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))
    refused("table", r"0 \(Embedding\): max_norm", lambda: rtp_ext.fully_rotate(table, **with_cpu))
    part = Tiny()
    replicated((2, 2), model=part.mlp, offload_policy=cpu)
    other = CPUOffloadPolicy(pin_memory=False)
    refused("another", "offload_policy CPU.*pin_memory=True", lambda: rtp_ext.fully_rotate(part, offload_policy=other))
    with cases.case("the policy of its part"):
        whole = rtp_ext.fully_rotate(part)
        assert rtp_ext.ring_of(whole).offload_policy == cpu
    elsewhere = cpu_offload.OffloadedShard(cpu_offload.HostMemory(torch.device("cpu"), False))
    refused("moved", "on the host.*got it on meta", lambda: elsewhere.borrow(torch.empty(2, device="meta")))
    model = replicated((2, 2), offload_policy=cpu if rank == 3 else OffloadPolicy())
    if rank > 1:  # of the other ring
        refused("ranks differ", "offload_policy: expected", lambda: batch_loss(model, rank, 0))


def trains(rank, ranks, cases, shape, factor):
    """Steps of AdamW on the host, with micro-batches, against one process."""
    with cases.case(f"offload on {shape}, divided by {factor}"):
        model = replicated(shape, offload_policy=CPUOffloadPolicy())
        rtp_ext.set_gradient_divide_factor(model, factor)
        memory, plain = rtp_ext.ring_of(model).host_memory, Tiny()
        share = 1.0 if factor else 1 / ranks
        optimizer, reference = adamw(model), adamw(plain)
        for name, parameter in plain.named_parameters():
            assert_same(full(model.get_parameter(name)), -parameter, 0.0, f"{name} on the host")
        for step, ways in enumerate(((True,), (False, True), (True, False, True))):

            def losses(ways=ways, step=step):
                for micro, reduces in enumerate(ways):
                    rtp_ext.set_requires_all_reduce(model, reduces)
                    yield lambda micro=micro: batch_loss(model, rank, 10 * step + micro)

            found, norm = step_on(model, optimizer, losses())
            batches = [lambda m=10 * step + micro: all_losses(plain, ranks, m, share) for micro in range(len(ways))]
            expected, expected_norm = step_on(plain, reference, batches)
            for name, gradient in negated(expected).items():
                assert_same(found[name], gradient, EXACT, f"step {step}: {name}")
            assert_same(norm, expected_norm, EXACT, f"norm of step {step}")
            assert_given_back(model)
        for name, parameter in plain.named_parameters():
            assert_same(full(model.get_parameter(name)), -parameter, EXACT, name)
        assert differs(full(model.mix.weight), plain.mix.weight, EXACT), "control: the host holds other numbers"
        assert memory.fetched == memory.waited > 3 * len(list(model.parameters())), (memory.fetched, memory.waited)
        assert rtp_ext.ring_of(model).prefetched() == (0, 0)


class Convolutions(nn.Module):
    """Layers that Tiny lacks: convolutions, attention, a whole bias."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 7, 3, padding=1)
        self.attend = nn.MultiheadAttention(7, 1, batch_first=True)
        self.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number) * 0.4)

    def loss(self, seed):
        x = self.conv(random(2, 6, 5, dtype=torch.float64, seed=seed)).transpose(1, 2)
        return self.attend(x, x, x, need_weights=False)[0].square().mean()

    forward = loss


def others(rank, ranks, cases):
    cpu = CPUOffloadPolicy()
    for shape in ((1, 4), (2, 2)):
        model, plain = replicated(shape, offload_policy=cpu), Tiny()
        all_losses(plain, ranks, 0, 1 / ranks).backward()
        with cases.case(f"torch.autograd.grad on {shape}"):
            for create_graph in (False, True):
                found = torch.autograd.grad(
                    batch_loss(model, rank, 0), list(model.parameters()), create_graph=create_graph
                )
                for (name, p), gradient in zip(plain.named_parameters(), found, strict=True):
                    assert_same(full(gradient.detach()), -p.grad, EXACT, name)
                    assert model.get_parameter(name).grad is None
        with cases.case(f"hooks on {shape}"):
            seen = []
            model.mix.weight.register_hook(lambda g, seen=seen: seen.append(full(g).clone()))
            model.embed.weight.register_post_accumulate_grad_hook(
                lambda p, seen=seen: seen.append(full(p.grad).clone())
            )
            batch_loss(model, rank, 0).backward()
            for value, name in zip(sorted(seen, key=len), ("mix.weight", "embed.weight"), strict=True):
                assert_same(value, -plain.get_parameter(name).grad, EXACT, f"hook of {name}")
            for name, gradient in negated(whole_gradients(plain)).items():
                assert_same(whole_gradients(model)[name], gradient, EXACT, name)
        for reentrant in (True, False):
            with cases.case(f"checkpointing on {shape}, reentrant {reentrant}"):
                again = copy.deepcopy(model)
                again.zero_grad()
                again.block = lambda x, inner=again.block, how=reentrant: checkpoint(inner, x, use_reentrant=how)
                batch_loss(again, rank, 0).backward()
                for name, gradient in negated(whole_gradients(plain)).items():
                    assert_same(whole_gradients(again)[name], gradient, EXACT, name)
                assert_given_back(again)
        with cases.case(f"a backward that fails on {shape}"):
            model.zero_grad()
            loss = batch_loss(model, rank, 0)
            failing = model.embed.weight.register_hook(lambda g: [][0])
            with pytest.raises(IndexError):
                loss.backward()
            failing.remove()
            model.zero_grad()
            batch_loss(model, rank, 0).backward()
            for name, gradient in negated(whole_gradients(plain)).items():
                assert_same(whole_gradients(model)[name], gradient, EXACT, name)
            assert_given_back(model)
    with cases.case("written between forward and backward"):
        loss = batch_loss(model, rank, 0)
        with torch.no_grad():
            model.mix.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with cases.case("convolutions and attention"):
        plain = Convolutions()
        model = replicated((2, 2), model=copy.deepcopy(plain), offload_policy=CPUOffloadPolicy(pin_memory=False))
        model(rank).backward()
        (sum(plain(other) for other in range(ranks)) / ranks).backward()
        for name, gradient in negated(whole_gradients(plain)).items():
            assert_same(whole_gradients(model)[name], gradient, EXACT, name)
        assert_given_back(model)
    with cases.case("bfloat16 parameters"):
        plain, model = Tiny(torch.bfloat16), Tiny(torch.bfloat16)
        model = replicated((2, 2), model=model, offload_policy=cpu)
        with rtp_ext.no_sync(model):
            batch_loss(model, rank, 0).backward()
        assert local(model.mix.weight.grad).dtype == torch.float32
        batch_loss(model, rank, 1).backward()
        for step in (0, 1):
            all_losses(plain, ranks, step, 1 / ranks).backward()
        for name, gradient in negated(whole_gradients(plain)).items():
            assert model.get_parameter(name).grad.dtype == torch.bfloat16
            assert_same(whole_gradients(model)[name], gradient, 0.05, name)
    moves = {
        "to": lambda model: model.to("cpu"),
        "double": lambda model: model.double(),
        "assign": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    }
    makers = {"on the host": lambda: {"offload_policy": cpu}, "plain": dict, "cut": lambda: {"outer": ZeroOuter()}}
    for (name, move), (kind, make) in itertools.product(moves.items(), makers.items()):
        with cases.case(f"moved where it was after a forward: {name}, {kind}"):
            model, plain = replicated((2, 2), dims=DIMS, **make()), Tiny()
            batch_loss(model, rank, 0).backward()
            move(model)
            model.zero_grad()
            loss = batch_loss(model, rank, 0)
            assert_same(loss, batch_loss(plain, rank, 0), EXACT, "loss")
            loss.backward()
            all_losses(plain, ranks, 0, 1 / ranks).backward()
            expected = whole_gradients(plain)
            for key, gradient in (negated(expected) if kind == "on the host" else expected).items():
                assert_same(whole_gradients(model)[key], gradient, EXACT, key)
    with cases.case("copies of a module that join later"):
        model = rtp_ext.fully_rotate(nn.Sequential(nn.Linear(4, 4)), offload_policy=cpu)
        with pytest.raises(ValueError, match=r"rotated_flyweight: expected a ring whose shards are on its device"):
            rotated_flyweight(nn.Linear(4, 4), {}, (), ring=rtp_ext.ring_of(model), shard_dims={})
    with cases.case("moved to another dtype, evaluated, and in a copy"):
        model, plain = replicated((2, 2), offload_policy=cpu, dims=DIMS), Tiny()
        assert_same(batch_loss(model, rank, 0), batch_loss(plain, rank, 0), EXACT, "loss")
        twin = copy.deepcopy(model).float()
        with torch.inference_mode():
            assert_same(batch_loss(twin, rank, 0), batch_loss(plain.float(), rank, 0), 1e-4, "float32")
        batch_loss(twin, rank, 0).backward()
        assert local(twin.mix.weight.grad).dtype == torch.float32
        assert_given_back(twin)
