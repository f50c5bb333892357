"""Zero-bubble pipelines over rings with fewer bytes: weights in 8 or 16 bits, direct or deferred gradients, in
backwards that are split in two. The reference is one process that rounds in the same way, or has a tolerance for
rounding."""

import torch
from grids import needs_split_backwards
from harness import on_ranks
from pipeline_models import MICRO, ROWS, TOLERANCE, Pipeline, batch, loss_of, make_parts, trains_like_one_process
from reference import assert_same, full, local, own_part
from rounded_travel import Contributions
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

import rtp_ext

PARTS, PLACES = 4, 3
LATE = {"gradient_route": "direct", "late_gradients": 2, "transport": "tcp"}
TRAINED = [
    (ScheduleZBVZeroBubble, {"travel": "int8", **LATE}, True),
    (ScheduleInterleavedZeroBubble, {"travel": "bfloat16", **LATE, "transport": "c10d"}, False),
]
ROUNDED = [
    (ScheduleInterleavedZeroBubble, {"gradient_travel": "int8", "gradient_route": "direct", "transport": "shm"}),
    (ScheduleZBVZeroBubble, {"gradient_travel": "int8", **LATE}),
]


def contributions():
    """Returns the gradients of the whole model, by name, for every micro-batch of every place."""
    found = {}
    for place in range(PLACES):
        ids, targets = batch(place, 0)
        for micro, rows in enumerate(torch.arange(MICRO * ROWS).split(ROWS)):
            model = nn.Sequential(*make_parts(PARTS))
            (loss_of(model(ids[rows]), targets[rows]) / (PLACES * MICRO)).backward()
            found[place, micro] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found


def rounds(cases, what, pipeline, given):
    """One backward, whose gradients travel in 8 bits: each contribution of another place, of every micro-batch, is
    rounded once."""
    pipeline.backward(0)
    rounding, mine = Contributions("int8"), pipeline.place
    for index, stage in pipeline.stages.items():
        first = pipeline.slices[index].start
        for name, parameter in stage.named_parameters():
            part, _, rest = name.partition(".")
            label = f"{first + int(part)}.{rest}"
            each = {key: gradients[label] for key, gradients in given.items()}
            own = sum(gradient for (place, _), gradient in each.items() if place == mine)
            others = [[each[place, micro] for micro in range(MICRO)] for place in range(PLACES) if place != mine]
            if ".norm." in name or name.endswith(".scale"):  # gathered, and not rounded
                with cases.case(f"{what}: {label}"):
                    assert_same(full(parameter.grad), sum(each.values()), TOLERANCE, label)
                continue
            with cases.case(f"{what}: {label}"):
                parts = [[own_part(parameter, gradient) for gradient in rank] for rank in others]
                rounding.check(label, local(parameter.grad), own_part(parameter, own), parts)
    with cases.case(what):
        rounding.controls()


@on_ranks(6, timeout=300.0)
@needs_split_backwards
def test_backwards_in_two_parts_with_fewer_bytes(cases):
    mesh = init_device_mesh("cpu", (2, PLACES), mesh_dim_names=("pp", "ring"))
    for schedule, how, inferred in TRAINED:
        pipeline = Pipeline(schedule, mesh, PARTS, inferred, how=how)
        what = f"{schedule.__name__} {how}"
        trains_like_one_process(cases, what, pipeline, PARTS, 2, how["travel"])
        with cases.case(f"{what}: late"):
            assert all(rtp_ext.ring_of(stage).landed_late() > 0 for stage in pipeline.stages.values())
        pipeline.close()
    given = contributions()
    for schedule, how in ROUNDED:
        pipeline = Pipeline(schedule, mesh, PARTS, how=how)
        rounds(cases, f"{schedule.__name__} {how}", pipeline, given)
        pipeline.close()
