"""Stages of a pipeline, each on its own ring: torch.distributed.pipelining with several schedules gives the results of
one process, clipped by the norm of all stages. Zero-bubble schedules compute the gradients of inputs and of parameters
in two backwards."""

from grids import schedules as possible
from harness import Cases, run_ranks
from pipeline_models import MICRO, Pipeline, trains_like_one_process
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

# with how many parts the model has, steps, and whether torch infers the shapes between stages
SCHEDULES = [
    (Schedule1F1B, 4, 4, False),
    (ScheduleInterleaved1F1B, 4, 3, True),
    (ScheduleInterleavedZeroBubble, 4, 4, True),
]


def _trains(rank, ranks, meshes):
    """Groups of ranks, each with one stage, or with two. Returns the counts of each schedule's last step."""
    cases, counted = Cases(), {}
    for shape, schedules in meshes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "ring"))
        for schedule, parts, steps, inferred in schedules:
            pipeline = Pipeline(schedule, mesh, parts, inferred)
            what = f"{schedule.__name__} on {shape}"
            for index, numbers in trains_like_one_process(cases, what, pipeline, parts, steps).items():
                counted[schedule.__name__, index] = numbers
            pipeline.close()
    cases.finish()
    return counted


def test_like_one_process():
    for counted in run_ranks(_trains, 4, [((2, 2), possible(SCHEDULES, SCHEDULES))]):
        for (schedule, index), (weights, gradients, sent, used, _) in counted.items():
            # The first backward of a step comes where the step before had more forwards, and the last the other way.
            assert 0.9 * sent < used <= sent, f"{schedule}, stage {index}: {used} of {sent} hops sent ahead were used"
            if schedule != ScheduleInterleavedZeroBubble.__name__:
                continue
            at_once = counted[ScheduleInterleaved1F1B.__name__, index]
            # The weights of the MLP bundle travel in both backwards; the first stage has one of the usual kind.
            bundle = MICRO if index > 0 else 0
            expected = at_once[0] - (at_once[2] - at_once[3]) + bundle, at_once[1]
            assert (weights - (sent - used), gradients) == expected, f"stage {index}: expected {expected}"


def test_three_stages_and_rings_of_three():
    three_stages = [(Schedule1F1B, 3, 3, False), (ScheduleInterleavedZeroBubble, 6, 3, True)]
    three_places = [(ScheduleInterleavedZeroBubble, 4, 3, False)]
    meshes = [((3, 2), possible(three_stages, three_stages)), ((2, 3), possible(three_places, SCHEDULES))]
    run_ranks(_trains, 6, meshes)
