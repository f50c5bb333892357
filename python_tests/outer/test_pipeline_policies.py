"""Pipelines whose stages are on replicas of rings, with local training: against as many whole models in one process,
each clipped by the norm of its own gradients."""

import functools

import pytest
import torch
from grids import few, schedules
from harness import on_ranks
from pipeline_models import LARGEST_NORM, Pipeline, adamw, batch, loss_of, make_parts
from reference import assert_same, differs, full
from test_local_training import diloco, gossip_beside, local_sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from workers import Workers

import rtp_ext
from rtp_ext.outer import DiLoCo, Gossip, LocalSGD
from rtp_ext.outer.local_training.diloco import nesterov

PARTS, STEPS, EXACT = 4, 3, 1e-9
POLICIES = [
    (Schedule1F1B, functools.partial(LocalSGD, 2), local_sgd(2)),
    (ScheduleInterleavedZeroBubble, functools.partial(DiLoCo, 2), diloco(2, nesterov)),
    (ScheduleZBVZeroBubble, functools.partial(Gossip, overlap=True), gossip_beside("one-peer")),
]


class Whole(nn.Sequential):
    def __init__(self):
        super().__init__(*make_parts(PARTS))


class WholeModels(Workers):
    """A whole model for each replica, trained on the batches of its ring's places."""

    def __init__(self, shape, act):
        self.replicas, self.ring = shape
        self.models = [Whole() for _ in range(self.replicas)]
        self.optimizers = [adamw(model.parameters()) for model in self.models]
        self.act, self.step, self.kept = act, 0, {}
        self.start = self.weights[0]

    def train(self, steps):
        for _ in range(steps):
            for worker, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                for place in range(worker * self.ring, (worker + 1) * self.ring):
                    ids, targets = batch(place, self.step)
                    (loss_of(model(ids), targets) / self.ring).backward()
                nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
                optimizer.step()
            self.step += 1
            with torch.no_grad():
                self.act(self)


@on_ranks(8, timeout=300.0)
def test_eight_ranks(cases):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "replicas", "ring"))
    shape, replica = tuple(mesh.shape[1:]), mesh.get_local_rank("replicas")
    for schedule, policy, act in schedules(few(POLICIES[2:], POLICIES), POLICIES):
        what = f"{schedule.__name__}, {policy()!r}"
        pipeline = Pipeline(schedule, mesh, PARTS, outer=policy)
        for step in range(STEPS):
            pipeline.step(step)
        workers, apart = WholeModels(shape, act), WholeModels(shape, lambda _: None)
        for each in (workers, apart):
            each.train(STEPS)
        theirs, alone = workers.models[replica], apart.models[replica]
        other = workers.models[1 - replica]
        for index, stage in pipeline.stages.items():
            which = pipeline.slices[index]
            found = [full(parameter.detach()) for parameter in stage.parameters()]
            expected, unmixed, others = (
                nn.Sequential(*list(each)[which]).parameters() for each in (theirs, alone, other)
            )
            with cases.case(f"{what}: stage {index}"):
                changed = 0
                for (name, _), *values in zip(stage.named_parameters(), found, expected, unmixed, others, strict=True):
                    assert_same(values[0], values[1], EXACT, name)
                    changed += differs(values[2], values[1], 1e-6) and differs(values[3], values[1], 1e-6)
                assert changed > 2, "controls: without the policy, and those of the other replica"
            policy_of_stage = rtp_ext.outer_of(stage)
            assert policy_of_stage.bytes_sent() > 0
            if len(pipeline.stages) > 1:
                with (
                    cases.case(f"{what}: an optimizer of two stages"),
                    pytest.raises(ValueError, match=r"optimizers of this model alone before state_dict, got a AdamW"),
                ):
                    policy_of_stage.state_dict()
            else:
                with cases.case(f"{what}: a state of its own"):
                    assert policy_of_stage.state_dict()["steps"] == STEPS
        pipeline.close()
