"""Gradients that travel compressed, against the same compressors on whole shards in one process."""

import copy
import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from local_training_cases import gather_all
from programs.workers import alone
from reference import assert_same, chunk, differs, full, local
from replica_models import Tiny, batch_loss, replicated
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from workers import EXACT, Replica, Workers, adamw

import rtp_ext
from rtp_ext.outer import EF21, AllReduce, Neolithic, PowerSGD, Quantize, RandomK, Sign, TopK

COMPRESSORS = {
    "top": lambda: TopK(0.2),
    "top without feedback": lambda: TopK(0.2, error_feedback=False),
    "random": lambda: RandomK(0.3),
    "unbiased": lambda: RandomK(0.5, error_feedback=False),
    "sign": Sign,
    "quantized": lambda: Quantize(4, 16),
    "low rank": lambda: PowerSGD(1),
    "EF21": lambda: EF21(TopK(0.3)),
    "EF21 of low rank": lambda: EF21(PowerSGD(1)),
    "Neolithic": lambda: Neolithic(TopK(0.1), 3),
    "Neolithic of low rank": lambda: Neolithic(PowerSGD(1), 2),
}


class Compressed:
    """One model in one process, trained on the compressed gradients of rings' shards."""

    def __init__(self, shape, compressor, dims):
        self.replicas, self.ring = shape
        self.compressor, self.dims = compressor, dims  # by name: the dimension that the ring shards, None: not sharded
        self.model = Tiny()
        self.optimizer = adamw(self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.memory, self.sent = {}, [[0, 0] for _ in range(self.ring)]

    def remember(self, name, shard):
        fresh = [self.compressor.remember(shard.shape, shard.dtype) for _ in range(self.replicas)]
        if self.compressor.error_feedback:
            for memory in fresh:
                memory["error"] = torch.zeros_like(shard)
        return fresh

    def train(self, steps):
        for step in range(steps):
            gradients = []
            for replica in range(self.replicas):
                ranks = range(replica * self.ring, (replica + 1) * self.ring)
                loss = sum(batch_loss(self.model, rank, step) for rank in ranks) / self.ring
                gradients.append(torch.autograd.grad(loss, list(self.model.parameters())))
            for (name, parameter), each in zip(
                self.model.named_parameters(), zip(*gradients, strict=True), strict=True
            ):
                shards = []
                for position in range(self.ring):
                    dim = self.dims[name]
                    cut = [g if dim is None else chunk(g, self.ring, position, dim).contiguous() for g in each]
                    if not cut[0].numel():
                        shards.append(cut[0])
                        continue
                    memories = self.memory.setdefault((name, position), self.remember(name, cut[0]))
                    mean, sent = alone(self.compressor, cut, memories)
                    shards.append(mean)
                    for kind in (0, 1):
                        self.sent[position][kind] += sent[kind]
                parameter.grad = shards[0] if self.dims[name] is None else torch.cat(shards, self.dims[name])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.schedule.step()


def cut_dims(model):
    return {name: getattr(parameter.placements[-1], "dim", None) for name, parameter in model.named_parameters()}


FEW = ("top", "random", "low rank", "Neolithic of low rank")


def compressed_cases(rank, ranks, cases):
    """One rank of each case computes the result that all must have."""
    chosen = [((2, 2), name) for name in COMPRESSORS] + [((4, 1), name) for name in FEW]
    for number, (shape, name) in enumerate(chosen):
        make = COMPRESSORS[name]
        with cases.case(f"{name} on {shape}"):
            replica = Replica(rank, shape, AllReduce(make(), bucket_bytes=300), attach=False)
            replica.train(4)
            rows = gather_all(replica.weights)
            assert (rows == rows[0]).all(), "replicas agree bit for bit"
            if rank != number % ranks:
                continue
            plain = Compressed(shape, make(), cut_dims(replica.model))
            plain.train(4)
            assert_same(rows[rank], Workers.flat(plain.model), EXACT, "weights")
            summed, gathered = plain.sent[rank % shape[1]]
            expected = 2 * (shape[0] - 1) * summed // shape[0] + (shape[0] - 1) * gathered
            assert replica.policy.bytes_sent() == expected, (replica.policy.bytes_sent(), expected)
    with cases.case("a tied weight, of which one use comes before a backward within the backward, and one after"):
        replica = Replica(rank, (2, 2), AllReduce(TopK(0.2)), attach=False)
        inner = replica.model.block
        replica.model.block = functools.partial(checkpoint, inner, use_reentrant=True)
        replica.train(3)
        plain = Compressed((2, 2), TopK(0.2), cut_dims(replica.model))
        plain.train(3)
        assert_same(replica.weights, Workers.flat(plain.model), EXACT, "weights")
    with cases.case("control: compressors differ from none"):
        exact = Replica(rank, (4, 1), AllReduce(), attach=False)
        exact.train(4)
        assert differs(exact.weights, rows[rank], 1e-3)


def compressed_state_cases(rank, ranks, cases, folder):
    for name in ("random", "EF21 of low rank"):
        with cases.case(f"restart of {name}"):
            first = Replica(rank, (2, 2), AllReduce(COMPRESSORS[name]()), attach=False)
            first.train(3)
            start, kept = copy.deepcopy(first.optimizer.state_dict()), first.weights
            schedule = first.schedule.state_dict()
            where = f"{folder}/{name.replace(' ', '')}"
            dcp.save({"policy": first.policy}, checkpoint_id=where)

            def as_it_was(name=name, kept=kept):
                model = Tiny()
                torch.nn.utils.vector_to_parameters(kept.clone(), model.parameters())
                return Replica(rank, (2, 2), AllReduce(COMPRESSORS[name]()), model=model, attach=False)

            again = as_it_was()
            dcp.load({"policy": again.policy}, checkpoint_id=where)
            again.optimizer.load_state_dict(copy.deepcopy(start))
            again.schedule.load_state_dict(schedule)
            again.step = 3
            for each in (first, again):
                each.train(3)
            assert torch.equal(again.weights, first.weights), "bit for bit"
            forgetful = as_it_was()
            forgetful.optimizer.load_state_dict(start)
            forgetful.schedule.load_state_dict(schedule)
            forgetful.step = 3
            forgetful.train(3)
            assert not torch.equal(forgetful.weights, first.weights), "control"
    with cases.case("states that do not fit"):
        other, plain = AllReduce(Sign()), AllReduce()
        _models = [replicated((2, 2), outer=policy) for policy in (other, plain)]  # a policy does not keep its own
        with pytest.raises(ValueError, match=r"expected the state of Sign.*got one of EF21\(PowerSGD\(1"):
            other.load_state_dict(first.policy.state_dict())
        with pytest.raises(ValueError, match="expected an empty state, got one of compressor, memory"):
            plain.load_state_dict(first.policy.state_dict())
    with cases.case("what is left out is left for later"):
        model = replicated((2, 2), outer=AllReduce(TopK(0.1)))
        policy = rtp_ext.outer_of(model)
        rtp_ext.set_requires_all_reduce(model, False)
        batch_loss(model, rank, 0).backward()
        assert policy.bytes_sent() == 0
        rtp_ext.set_requires_all_reduce(model, True)
        batch_loss(model, rank, 1).backward()
        rows = gather_all(full(model.mix.weight.grad).reshape(-1))
        assert torch.equal(rows[0], rows[3]) and (rows[0] == 0).any(), "the same everywhere, and sparse"
        index = model.mix.weight.__dict__["_rtp_gradient_handler"].index
        assert policy._compression.memory[index]["error"].abs().sum() > 0
        (gradient,) = torch.autograd.grad(batch_loss(model, rank, 2), [model.mix.weight])
        assert torch.equal(*gather_all(full(gradient).reshape(-1))[::3]) and (local(gradient) == 0).any()
        twin = copy.deepcopy(model)
        assert repr(rtp_ext.outer_of(twin)) == repr(policy) and "AllReduce(" in repr(policy)
    with cases.case("refused"):
        with pytest.raises(TypeError, match=r"expected a compressor of rtp_ext.outer, got 300"):
            AllReduce(300)
        half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        model = replicated((2, 2), model=Tiny(torch.float32), outer=AllReduce(Sign()), mp_policy=half)
        loss = batch_loss(model, rank, 0)
        with pytest.raises(ValueError, match=r"expected reduce_dtype=None or torch.float32.*got torch.bfloat16"):
            loss.backward()
        model = replicated((2, 2), outer=AllReduce(TopK(0.1 + 0.1 * (rank // 2))))
        loss = batch_loss(model, rank, 0)
        with pytest.raises(ValueError, match=r"disagree on the compressor: expected TopK\(0.1, .*got TopK\(0.2"):
            loss.backward()
    with cases.case("a checkpoint on one replica only"):
        first = Replica(rank, (2, 2), AllReduce(RandomK(0.5)), attach=False)
        first.train(1)
        state = copy.deepcopy(first.policy.state_dict())
        first.train(1)
        if rank >= 2:  # it loads its own state
            first.policy.load_state_dict(state)
        with pytest.raises(ValueError, match="every rank has to do the same"):
            first.train(1)
        for changed in ((2, 3), (2,)):  # a replica, and one rank of it
            first = Replica(rank, (2, 2), AllReduce(RandomK(0.5)), attach=False)
            first.train(1)
            early = copy.deepcopy(first.policy.state_dict())
            first.train(1)
            first.policy.load_state_dict(early if rank in changed else copy.deepcopy(first.policy.state_dict()))
            with pytest.raises(ValueError, match=r"disagree on the shared state of RandomK\(0.5"):
                first.train(1)
    for name in ("top", "sign", "quantized", "low rank"):
        with cases.case(f"{name} of a gradient that is not finite on one replica"):
            replica = Replica(rank, (4, 1), AllReduce(COMPRESSORS[name]()), attach=False)
            replica.train(1)
            loss = batch_loss(replica.model, rank, 1)
            with pytest.raises(ValueError, match=r"takes gradients that are finite.*GradScaler"):
                (loss * (float("inf") if rank == 2 else 1.0)).backward()
