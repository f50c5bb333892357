"""n workers in one process, the reference of policies between replicas."""

from __future__ import annotations

import torch
from reference import assert_same, wholes
from replica_models import Tiny, adamw, all_losses, batch_loss, replicated
from shards import SGD, clip_shards
from torch import nn

import rtp_ext

STEPS = 6
EXACT = 1e-12
CLIP = 0.1


def momentum(model):
    return SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


class Workers:
    """Plain models, a worker for each replica; each trains on the batches of its ring's ranks.

    `act(workers)` is the rule between them after each step, `workers.step` the number of the step, from 1.
    """

    def __init__(self, shape, act, make=adamw, clip=CLIP):
        self.replicas, self.ring = shape
        self.models = [Tiny() for _ in range(self.replicas)]
        self.optimizers = [make(model) for model in self.models]
        self.schedules = [halving(optimizer) for optimizer in self.optimizers]
        self.act, self.clip, self.step = act, clip, 0
        self.kept, self.start = {}, self.flat(self.models[0])  # the state of `act`, and the initial weights

    def train(self, steps):
        for _ in range(steps):
            for worker, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                ranks = range(worker * self.ring, (worker + 1) * self.ring)
                all_losses(model, ranks, self.step, 1 / self.ring).backward()
                if self.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                optimizer.step()
            for schedule in self.schedules:
                schedule.step()
            self.step += 1
            with torch.no_grad():
                self.act(self)

    @property
    def weights(self):
        """[n, elements], a copy."""
        return torch.stack([self.flat(model) for model in self.models])

    @staticmethod
    def flat(model):
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    def put(self, weights):
        for model, row in zip(self.models, weights, strict=True):
            nn.utils.vector_to_parameters(row, model.parameters())

    def mix(self, matrix):
        self.put(matrix @ self.weights)


class Replica:
    """The model of this rank's ring, with its optimizer and its policy."""

    def __init__(self, rank, shape, policy, make=adamw, clip=CLIP, model=None, attach=True, **options):
        self.rank, self.clip, self.step = rank, clip, 0
        self.number = rank // shape[1]
        self.model = replicated(shape, model=model, outer=policy, **options)
        self.policy = rtp_ext.outer_of(self.model)
        self.optimizer = make(self.model)
        self.schedule = halving(self.optimizer)
        if attach:
            self.policy.attach(self.optimizer)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            batch_loss(self.model, self.rank, self.step).backward()
            if self.clip:
                clip_shards(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.schedule.step()
            self.step += 1

    @property
    def weights(self):
        return torch.cat([value.reshape(-1) for value in wholes(self.model.parameters())])


def assert_trained_alike(replica, workers, what, tolerance=EXACT):
    named = workers.models[replica.number].named_parameters()
    for (name, expected), found in zip(named, wholes(replica.model.parameters()), strict=True):
        assert_same(found, expected, tolerance, f"{what}: {name}")
