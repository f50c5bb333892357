"""Stages of a pipeline on three dimensions. On replicas of rings gradients are reduced over the replicas once in a
step, whatever the schedule; tensor parallelism cuts the layers of stages."""

import torch
import torch.distributed as dist
from grids import few, schedules
from harness import on_ranks
from pipeline_models import Pipeline, trains_like_one_process
from reference import local
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate

from rtp_ext.outer import AllReduce, ZeroOuter

PARTS = 4
# with the policy between replicas, steps, and whether torch infers the shapes between stages
ENOUGH = [
    (Schedule1F1B, AllReduce, 2, False),
    (ScheduleInterleaved1F1B, ZeroOuter, 2, True),
    (ScheduleInterleavedZeroBubble, AllReduce, 2, False),
]
# backwards in two parts under ZeroOuter are in outer/test_zero_outer.py too
SCHEDULES = schedules(few(ENOUGH, [*ENOUGH, (ScheduleInterleavedZeroBubble, ZeroOuter, 2, False)]), ENOUGH)
BOTH = [ScheduleInterleavedZeroBubble, Schedule1F1B]
TENSOR_PARALLEL = schedules(few(BOTH[:1], BOTH), BOTH)


def bytes_of_a_step(stage, outer, mesh):
    """Returns the bytes that a rank sends for one reduction of a stage's gradients; for ZeroOuter also for an update of
    its weights.

    The counts are those of Gloo, where a reduce-scatter is an all-reduce.
    """
    group, replicas = mesh.get_group("replicas"), mesh["replicas"].size()
    largest = torch.tensor([local(p).numel() for p in stage.parameters()])  # of the pieces of a shard
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if outer is AllReduce:
        return 2 * (replicas - 1) * int(largest.sum()) * 8 // replicas
    cut = torch.tensor([p.placements[0] != Replicate() for p in stage.parameters()])
    return (replicas - 1) * int(2 * largest.sum() + largest[cut].sum()) * 8


@on_ranks(8, timeout=300.0)
def test_eight_ranks(cases):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "replicas", "ring"))
    for schedule, outer, steps, inferred in SCHEDULES:
        pipeline = Pipeline(schedule, mesh, PARTS, inferred, outer)
        what = f"{schedule.__name__}, {outer.__name__}"
        counted = trains_like_one_process(cases, what, pipeline, PARTS, steps)
        for index, stage in pipeline.stages.items():
            with cases.case(f"{what}: bytes of stage {index}"):
                expected = bytes_of_a_step(stage, outer, mesh)
                assert 0 <= counted[index][-1] - expected + 1 <= 1, (counted[index][-1], expected)
        pipeline.close()
    tensor = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "ring", "tp"))
    for schedule in TENSOR_PARALLEL:
        pipeline = Pipeline(schedule, tensor, PARTS)
        trains_like_one_process(cases, f"{schedule.__name__}, tensor parallel", pipeline, PARTS, 2)
        pipeline.close()
