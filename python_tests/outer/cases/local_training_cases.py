"""Policies that act after steps: their state, counts and refusals, on 2 x 2 ranks."""

import copy
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from grids import few
from reference import assert_same, differs, full, local
from replica_models import Tiny, adamw, all_losses, batch_loss, replicated
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from workers import EXACT, STEPS, Replica, Workers, assert_trained_alike, momentum

import rtp_ext
from rtp_ext.outer import AllReduce, DiLoCo, Gossip, LocalSGD, mixing_matrix

SHAPE = (2, 2)


def gather_all(weights):
    """[ranks, elements]"""
    rows = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, weights.contiguous())
    return torch.stack(rows)


# -- exact results -----------------------------------------------------------------------------------------------------


def property_cases(rank, ranks, cases):
    plain = Tiny()
    optimizer = momentum(plain)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        all_losses(plain, ranks, step, 1 / ranks).backward()
        optimizer.step()
        schedule.step()
    parallel = Workers.flat(plain)
    local_sgd = Replica(rank, SHAPE, LocalSGD(1), momentum, clip=None)
    unit = Replica(rank, SHAPE, DiLoCo(2, lambda p: torch.optim.SGD(p, lr=1.0)))
    same = Replica(rank, SHAPE, LocalSGD(2))
    complete = Replica(rank, SHAPE, Gossip("complete"), momentum, clip=None)
    for replica in (local_sgd, unit, same, complete):
        replica.train(STEPS)
    with cases.case("local SGD, H = 1, with momentum and weight decay, is data parallelism"):
        assert_same(local_sgd.weights, parallel, EXACT, "weights")
    with cases.case("gossip on the complete graph is too"):
        assert_same(complete.weights, parallel, EXACT, "weights")
    with cases.case("with AdamW it is not"):
        apart, reference = (
            Replica(rank, SHAPE, LocalSGD(1), clip=None),
            Replica(rank, SHAPE, AllReduce(), clip=None, attach=False),
        )
        apart.train(3)
        reference.train(3)
        assert differs(apart.weights, reference.weights, 1e-3)
    with cases.case("DiLoCo whose outer step is SGD with lr 1 is local SGD"):
        assert_same(unit.weights, same.weights, EXACT, "weights")
        assert differs(unit.weights, local_sgd.weights, 1e-3), "control"
    with cases.case("mixing commutes with the cut, bit for bit"):
        replica, before = Replica(rank, SHAPE, Gossip(), attach=False), []
        replica.optimizer.register_step_post_hook(lambda *_: before.append(replica.weights))
        replica.policy.attach(replica.optimizer)
        replica.train(1)
        rows = gather_all(before[0])
        assert not torch.equal(rows[0], rows[2]), "control"
        assert torch.equal(replica.weights, rows[0] * 0.5 + rows[2] * 0.5)


# -- sent bytes --------------------------------------------------------------------------------------------------------


def counting_cases(rank, ranks, cases):
    with cases.case("bytes"):
        policies = (LocalSGD(2), DiLoCo(2), Gossip(), Gossip(overlap=True), AllReduce())
        for policy in policies:
            replica = Replica(rank, SHAPE, policy, attach=not isinstance(policy, AllReduce))
            own = sum(local(p).nbytes for p in replica.model.parameters())
            replica.train(2)
            expected = {LocalSGD: own, DiLoCo: own, Gossip: 2 * own, AllReduce: 2 * own}[type(policy)]
            assert policy.bytes_sent() == expected, (policy, policy.bytes_sent(), expected)
        assert 40 * policies[1].bytes_sent() <= 50 / 2 * policies[-1].bytes_sent(), "one outer step for 50 steps"
    with cases.case("complete, and what is frozen"):
        model = Tiny()
        model.mix.requires_grad_(False)
        replica = Replica(rank, SHAPE, Gossip("complete"), model=model)
        sent = sum(local(p).nbytes for p in replica.model.parameters() if p.requires_grad)
        replica.train(1)
        assert replica.policy.bytes_sent() == sent, (replica.policy.bytes_sent(), sent)


# -- ways to train -----------------------------------------------------------------------------------------------------


def training_cases(rank, ranks, cases):
    def two_means(workers):
        if workers.step % 2 == 0:
            workers.mix(mixing_matrix("complete", 2))

    with cases.case("in place"):
        replica, workers = Replica(rank, SHAPE, LocalSGD(2), in_place=True), Workers(SHAPE, two_means)
        for each in (replica, workers):
            each.train(4)
        assert_trained_alike(replica, workers, "in place")
    with cases.case("micro-batches, a divide factor, and two optimizers"):
        model, policy = replicated(SHAPE, outer=LocalSGD(1)), None
        policy = rtp_ext.outer_of(model)
        rtp_ext.set_gradient_divide_factor(model, 2)
        parts = [list(model.mlp.parameters()), [p for n, p in model.named_parameters() if "mlp" not in n]]
        policy.attach(*(torch.optim.SGD(part, lr=0.5) for part in reversed(parts)))
        replaced = policy._optimizers[1]
        policy.attach(torch.optim.SGD(parts[0], lr=0.1))  # replaces the one of these parameters, keeps the other
        policy.attach(torch.optim.SGD(parts[1], lr=0.1))
        assert [[*o.param_groups[0]["params"]] for o in policy._optimizers] == parts
        with pytest.raises(ValueError, match=r"SGD: expected an optimizer that .* knows of"):
            replaced.step()
        plain = Tiny()
        for step in range(2):
            rtp_ext.set_requires_all_reduce(model, False)
            batch_loss(model, rank, 2 * step).backward()
            rtp_ext.set_requires_all_reduce(model, True)
            batch_loss(model, rank, 2 * step + 1).backward()
            loss = all_losses(plain, ranks, 2 * step, 1 / 2) + all_losses(plain, ranks, 2 * step + 1, 1 / 2)
            for p, gradient in zip(plain.parameters(), torch.autograd.grad(loss, plain.parameters()), strict=True):
                p.data -= 0.1 * gradient
            for optimizer in policy._optimizers:
                optimizer.step()
            model.zero_grad()
        for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(p.detach()), expected, EXACT, name)
        batch_loss(model, rank, 5).backward()
        policy._optimizers[0].step()
        with pytest.raises(ValueError, match=r"attached to 2 optimizers: expected each to step once"):
            policy._optimizers[0].step()
    with cases.case("bfloat16 is added up in float32 and rounded once"):
        replica, before = Replica(rank, SHAPE, LocalSGD(1), model=Tiny(torch.bfloat16), attach=False), []
        replica.optimizer.register_step_post_hook(lambda *_: before.append(replica.weights.float()))
        replica.policy.attach(replica.optimizer)
        replica.train(1)
        rows = gather_all(before[0])
        assert torch.equal(replica.weights, ((rows[0] + rows[2]) / 2).bfloat16())
    with cases.case("a copy has a policy of its own"):
        replica = Replica(rank, SHAPE, LocalSGD(5))
        replica.train(1)
        twin = copy.deepcopy(replica.model)
        policy = rtp_ext.outer_of(twin)
        assert policy is not replica.policy and repr(policy) == repr(replica.policy)
        with pytest.raises(ValueError, match=r"LocalSGD.*average"):
            twin.state_dict()
        policy.attach(adamw(twin))
        policy.average()
        twin.state_dict()
        assert not torch.equal(local(twin.mix.weight), local(replica.model.mix.weight))
    with cases.case("one replica"):
        replica, lone = Replica(rank, (1, 4), LocalSGD(1)), Replica(rank, (1, 4), DiLoCo(2))
        workers = Workers((1, 4), lambda workers: None)
        for each in (replica, lone, workers):
            each.train(2)
        assert_trained_alike(replica, workers, "local SGD of one")
        replica.policy.average()
        assert replica.policy.state_dict() == {} and replica.model.state_dict() and replica.optimizer.state_dict()
        start, end = Workers.flat(Tiny()), workers.weights[0]
        assert_same(lone.weights, start + 0.7 * 1.9 * (end - start), EXACT, "an outer step of one")
        lone.model.state_dict()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def other_values():
    model = Tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    return model


def checkpoint_cases(rank, ranks, cases, folder):
    policies = {
        "local": (SHAPE, lambda: LocalSGD(3)),
        "streaming": (SHAPE, lambda: DiLoCo(4, fragments=2, delay=1)),
        "beside": ((4, 1), lambda: Gossip(overlap=True)),
        "gossip": ((4, 1), lambda: Gossip("ring", global_period=3)),
    }
    every = [(name, begun) for name in policies for begun in ((4, 0) if name == "streaming" else (4,))]
    # gossip without overlap has less state than gossip with overlap
    for name, begun in few([each for each in every if each[0] != "gossip"], every):
        shape, make = policies[name]
        with cases.case(f"restart of {name} after {begun}"):
            first = Replica(rank, shape, make())
            first.train(begun)
            where, schedule = f"{folder}/{name}{begun}", first.schedule.state_dict()
            dcp.save({"policy": first.policy}, checkpoint_id=where)
            saved = gather_all(first.weights)
            assert torch.equal(saved[0], saved[2]) == (begun == 0), "replicas differ when they are saved"
            first.train(4)
            again = Replica(rank, shape, make(), model=other_values())
            dcp.load({"policy": again.policy}, checkpoint_id=where)
            assert torch.equal(again.weights, saved[rank]), "each its own"
            again.schedule.load_state_dict(schedule)
            again.step = begun
            again.train(4)
            assert torch.equal(again.weights, first.weights), "bit for bit"
            assert not torch.equal(again.weights, saved[rank]), "control"
    replica = Replica(rank, SHAPE, Gossip("ring", 3))
    with cases.case("plain state dicts of replicas that differ"):
        replica.train(1)
        for what in (
            replica.model.state_dict,
            replica.model.mlp.state_dict,
            lambda: get_model_state_dict(replica.model),
            replica.optimizer.state_dict,
        ):
            with pytest.raises(ValueError, match=r"mixture of them: expected outer_of\(model\).average\(\)"):
                what()
    with cases.case("average"):
        rows = gather_all(replica.weights)
        moments = full(replica.optimizer.state[replica.model.mix.weight]["exp_avg"])
        both = gather_all(moments)
        replica.policy.average()
        assert_same(replica.weights, (rows[0] + rows[2]) / 2, EXACT, "weights")
        moments = full(replica.optimizer.state[replica.model.mix.weight]["exp_avg"])
        assert_same(moments, (both[0] + both[2]) / 2, EXACT, "moments")
        assert differs(moments, both[0], 1e-3), "control"
        saved = dict(zip(("model", "optimizer"), get_state_dict(replica.model, replica.optimizer), strict=True))
        dcp.save(saved, checkpoint_id=f"{folder}/plain")
        loaded = Replica(rank, SHAPE, LocalSGD(2), model=other_values())
        model, optimizer = loaded.model, loaded.optimizer
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=f"{folder}/plain")
        assert loaded.policy._steps == 0, "torch's step for a state to load into is none"
        assert torch.equal(loaded.weights, replica.weights)
        loaded.train(2)
        model.state_dict()  # their weights agree
        with pytest.raises(ValueError, match=r"state_dict of AdamW.*average"):
            optimizer.state_dict()
    with cases.case("states that do not fit"):
        state = replica.policy.state_dict()
        with pytest.raises(ValueError, match=r"expected the state of a LocalSGD, got one of 'Gossip'"):
            loaded.policy.load_state_dict(state)
        name = "mix.weight"
        other = {**state, "parameters": {n: v for n, v in state["parameters"].items() if n != name}}
        with pytest.raises(ValueError, match=rf"same parameters, got differences in {name}"):
            replica.policy.load_state_dict(other)
        other = {**state, "parameters": {**state["parameters"], name: replica.model.mix.weight.detach()}}
        with pytest.raises(ValueError, match=rf"{name}: expected \(2, 7, 7\).*got \(7, 7\)"):
            replica.policy.load_state_dict(other)


# -- refusals ----------------------------------------------------------------------------------------------------------


def local_training_refusals(rank, ranks, cases):
    def refused(what, match, act, error=ValueError):
        with cases.case(what), pytest.raises(error, match=match):
            act()

    refused("period", "LocalSGD: expected period >= 1, got 0", lambda: LocalSGD(0))
    refused("no int", "period to be an int, got 2.0", lambda: LocalSGD(2.0), TypeError)
    refused("warmup", "warmup >= 0, got -1", lambda: LocalSGD(1, -1))
    refused("fragments", "fragments <= period", lambda: DiLoCo(2, fragments=3))
    refused("delay", "delay < period // fragments", lambda: DiLoCo(4, fragments=2, delay=2))
    refused("keep", "keep in \\[0, 1\\), got 1", lambda: DiLoCo(4, keep=1))
    refused("topology", "one-peer, exponential, ring, grid, complete, got 'star'", lambda: Gossip("star"))
    refused("global period", "multiple of period 2, got 3", lambda: Gossip("ring", 2, global_period=3))
    six = types.SimpleNamespace(replicas=6)
    refused("six", "expected 4 or 8, got 6; for 6 take one of", lambda: Gossip().connect(six))
    refused("no model", "expected fully_rotate\\(..., outer=this policy\\)", lambda: LocalSGD(1).attach(adamw(Tiny())))

    def unattached(policy):
        replica = Replica(rank, SHAPE, policy, attach=False)
        model, optimizer = replica.model, replica.optimizer
        refused("a list", "expected a torch.optim.Optimizer, got a list", lambda: policy.attach([]), TypeError)
        refused("nothing", "expected an optimizer to attach to", policy.attach, TypeError)
        refused("another's", "AdamW that has none of them", lambda: policy.attach(adamw(Tiny())))
        refused("state before", "expected attach\\(optimizer\\) before state_dict", policy.state_dict)
        with cases.case("a first forward, and evaluation"):
            for _ in range(2):
                model(torch.zeros(1, 2, dtype=torch.int64))
            batch_loss(model, rank, 0).backward()
            with torch.no_grad():
                batch_loss(model, rank, 0)
        refused("a step unseen", "AdamW: expected an optimizer that .* knows of.*attach", optimizer.step)
        refused("never attached", "outer_of\\(model\\).attach\\(optimizer\\)", lambda: batch_loss(model, rank, 1))
        policy.attach(optimizer)
        batch_loss(model, rank, 1).backward()
        optimizer.step()

    unattached(LocalSGD(1))
    unattached(Gossip())
    with cases.case("the policies differ"):
        replica = Replica(rank, SHAPE, LocalSGD(1 + rank // 2))
        with pytest.raises(ValueError, match=r"on the policy: expected LocalSGD\(period=1.*LocalSGD\(period=2"):
            replica.train(1)
    with cases.case("weights differ at the start"):
        model = Tiny()
        with torch.no_grad():
            model.mix.weight.add_(0.1 * (rank >= 2))
        with pytest.raises(ValueError, match=r"values of mix.weight in replica 1.*Seed every"):
            Replica(rank, SHAPE, LocalSGD(1), model=model).train(1)
    with cases.case("steps differ"):
        replica = Replica(rank, SHAPE, LocalSGD(2))
        replica.train(1)
        replica.policy._steps += 2 * (rank // 2)
        with pytest.raises(ValueError, match=r"expected the mean of weights after step 2.*after step 4 in replica 1"):
            replica.train(1)
        replica = Replica(rank, SHAPE, Gossip())
        replica.train(1)
        replica.policy._steps += rank // 2
        with pytest.raises(ValueError, match=r"expected gossip with ticket \[[23], .*from replica [01]"):
            replica.train(1)
    with cases.case("whole parameters"):
        replica = Replica(rank, SHAPE, LocalSGD(1))
        replica.model.mix.adapter = nn.Parameter(torch.ones(7, dtype=torch.float64))
        replica.model.mix.register_forward_hook(lambda module, _, y: y * module.adapter)
        loss = batch_loss(replica.model, rank, 0)
        with pytest.raises(ValueError, match=r"mix.adapter is held whole"):
            loss.backward()
    with cases.case("trained later than the first step"):
        model = Tiny()
        model.mix.requires_grad_(False)
        replica = Replica(rank, SHAPE, DiLoCo(2), model=model)
        replica.train(1)
        model.mix.requires_grad_(True)
        with pytest.raises(ValueError, match=r"from the first step on, got mix.weight too"):
            replica.train(1)
        with pytest.raises(ValueError, match=r"as many fragments as parameters, 10, got 11"):
            Replica(rank, SHAPE, DiLoCo(20, fragments=11)).train(1)
        with pytest.raises(TypeError, match=r"outer_optimizer to make a torch.optim.Optimizer, got a list"):
            Replica(rank, SHAPE, DiLoCo(2, list)).train(1)
    for what, change in (("another one", lambda m: (m.other, m.mix)), ("none", lambda m: (nn.Identity(), m.other))):
        with cases.case(f"modules exchanged or removed: {what}"):
            model = Tiny()
            model.other = nn.Linear(7, 7, dtype=torch.float64)
            nn.utils.vector_to_parameters(torch.ones(56, dtype=torch.float64), model.other.parameters())
            replica = Replica(rank, SHAPE, DiLoCo(2), model=model)
            replica.train(1)
            model.mix, model.other = change(model)
            with pytest.raises(ValueError, match=rf"DiLoCo.*got {what} for mix.weight: do not exchange or remove"):
                replica.train(1)
    with cases.case("a module that is removed while gossip is under way"):
        replica = Replica(rank, SHAPE, Gossip(overlap=True), momentum)
        replica.train(1)
        replica.model.mix = nn.Identity()
        replica.train(2)
        replica.policy.average()
    with cases.case("used by one replica only"):
        replica = Replica(rank, SHAPE, LocalSGD(1))
        replica.model.mixes = rank < 2
        replica.train(1)
        with pytest.raises(ValueError, match=r"state exp_avg of mix.weight .* got it in replicas \[0\]"):
            replica.policy.average()
    with cases.case("its gradients in one step only"):
        replica = Replica(rank, SHAPE, LocalSGD(1))
        replica.train(1)
        replica.model.mixes = rank < 2
        replica.train(1)
        for act in (replica.policy.state_dict, replica.policy.average):
            with pytest.raises(ValueError, match=r"step of mix.bias 2.0 \(replica 0\), got .*bias 1.0 in replica 1"):
                act()
        replica = Replica(rank, SHAPE, LocalSGD(1), momentum)
        replica.train(1)
        replica.policy.state_dict()
        replica.optimizer.param_groups[0]["lr"] *= 1 + rank // 2
        with pytest.raises(
            ValueError, match=r"expected lr of group 0 of .* 0.05 \(replica 0\), got lr of .* 0.1 in rep"
        ):
            replica.policy.state_dict()


def frozen_cases(rank, ranks, cases):
    """Parameters that only some replicas have frozen."""
    for shape, first in ((SHAPE, 2), ((4, 1), 3)):
        with cases.case(f"frozen from rank {first} on, {shape}"):
            replica = Replica(rank, shape, LocalSGD(1))
            replica.model.mix.bias.requires_grad_(rank < first)
            with pytest.raises(ValueError, match=r"in the same order, the same of them frozen"):
                replica.train(1)
    for frozen in (False, True):
        with cases.case(f"later on one replica: frozen {frozen}"):
            model = Tiny()
            model.mix.requires_grad_(frozen)
            replica = Replica(rank, SHAPE, LocalSGD(3), model=model)
            replica.train(1)
            if rank >= 2:
                model.mix.requires_grad_(not frozen)
            with pytest.raises(ValueError, match=r"what comes next: .*every rank has to do the same with its model"):
                replica.train(2)
    with cases.case("a GradScaler"):
        replica = Replica(rank, SHAPE, LocalSGD(1))
        for enabled in (False, True):
            scaler = torch.amp.GradScaler("cpu", enabled=enabled)
            scaler.scale(batch_loss(replica.model, rank, 0)).backward()
            if enabled:
                with pytest.raises(ValueError, match=r"LocalSGD.*GradScaler leaves out steps on one replica alone"):
                    scaler.step(replica.optimizer)
            else:
                scaler.step(replica.optimizer)
