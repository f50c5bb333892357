"""Stages of a pipeline whose experts are divided over one dimension of the mesh and rotated over another, against the
whole model in one process on the batches of all ranks."""

import copy

import torch
from harness import on_ranks
from hf_models import fill
from reference import adamw, assert_same, differs, random
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

import rtp_ext
from rtp_ext import RotationDims
from rtp_ext.nn import RotatedExperts

D, MICRO, ROWS, TOKENS = 6, 4, 2, 3
# schedules, numbers of stages, and of experts, which are whole, or cut along their hidden features
SCHEDULES = (Schedule1F1B, 2, 4), (ScheduleInterleavedZeroBubble, 4, 3)
DIMS = RotationDims(ring="ring", expert="expert")


class Stage(nn.Module):
    """A linear layer and a mixture of Mixtral."""

    def __init__(self, experts):
        super().__init__()
        from transformers.models.mixtral import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        sizes = {"hidden_size": D, "intermediate_size": 4, "num_local_experts": experts, "num_experts_per_tok": 2}
        self.mix = nn.Linear(D, D)
        self.mixture = MixtralSparseMoeBlock(MixtralConfig(experts_implementation="eager", **sizes))

    def forward(self, x):
        x = x + self.mix(x)
        return x + self.mixture(x)


def batch(place, step):
    """Inputs and targets of a rank's micro-batches."""
    return [random(MICRO * ROWS, TOKENS, D, dtype=torch.float64, seed=100 * step + 10 * place + n) for n in (0, 1)]


def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


@on_ranks([4, 8])
def test_like_one_process(rank, ranks, cases):
    """Stages on 1 x 2 and 2 x 2 ranks, one and two on each."""
    rings = ranks // 4
    mesh = init_device_mesh("cpu", (2, rings, 2), mesh_dim_names=("pp", "ring", "expert"))
    inner, place = mesh["ring", "expert"], rank % (2 * rings)
    for schedule, count, experts in SCHEDULES:
        plain = fill(nn.Sequential(*(Stage(experts) for _ in range(count))).double())
        start, expected = copy.deepcopy(plain), adamw(plain.parameters(), lr=0.02)
        mine = {index: copy.deepcopy(plain[index]) for index in range(mesh.get_local_rank("pp"), count, 2)}
        made = []
        for index, stage in mine.items():
            rtp_ext.fully_rotate(stage, mesh=inner, dims=DIMS, timeout=60.0)
            assert any(isinstance(part, RotatedExperts) for part in stage.modules())
            shape = torch.zeros(ROWS, TOKENS, D, dtype=torch.float64)
            shapes = {
                "input_args": (shape.clone().requires_grad_(index > 0),),
                "output_args": (shape.requires_grad_(),),
            }
            group = mesh.get_group("pp")
            made.append(PipelineStage(stage, index, count, torch.device("cpu"), group=group, **shapes))
        stages = schedule(made if count > 2 else made[0], n_microbatches=MICRO, loss_fn=loss_of)
        optimizer = adamw([p for stage in mine.values() for p in stage.parameters()], lr=0.02)
        for step in range(3):
            x, target = batch(place, step)
            losses = []
            last = {"target": target, "losses": losses} if count - 1 in mine else {}
            stages.step(*([x] if 0 in mine else []), **last)
            optimizer.step()
            optimizer.zero_grad()
            all_losses = [loss_of(plain(x), target) for x, target in (batch(each, step) for each in range(2 * rings))]
            (sum(all_losses) / len(all_losses)).backward()
            expected.step()
            expected.zero_grad()
            with cases.case(f"{schedule.__name__}, loss of step {step}"):
                if losses:
                    assert_same(torch.stack(losses).mean(), all_losses[place], 1e-9, "loss")
        for index, stage in mine.items():
            for name, parameter in stage.named_parameters():
                with cases.case(f"{schedule.__name__}, {index}.{name}"):
                    theirs = plain[index].get_parameter(name)
                    assert_same(parameter.full_tensor(), theirs, 1e-9, name)
                    assert differs(theirs, start[index].get_parameter(name), 1e-3), "control: it has changed"
            rtp_ext.ring_of(stage).close()
