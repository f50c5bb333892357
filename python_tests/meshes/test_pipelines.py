"""Stages of a pipeline, each on a ring of its own: torch.distributed.pipelining with several schedules, like one
process. Zero-bubble schedules compute the gradients of inputs and of parameters in two backwards."""

import torch
import torch.distributed as dist
from harness import Cases, run_ranks
from models import Block
from reference import adamw, assert_same, differs, full, random
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import rtp_ext

TOLERANCE = 1e-9
VOCABULARY, WIDTH, TOKENS = 19, 9, 5  # not divisible by 2
MICRO, ROWS = 4, 2


class Part(nn.Module):
    """One of four parts of a language model. Norms, a stray parameter, linear layers, an MLP bundle, attention."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.block = Block(WIDTH, 23)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True) if index == 2 else None
        self.norm = nn.LayerNorm(WIDTH) if index == 3 else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if index == 3 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        x = self.block(x)
        x = x + self.mlp(x)
        if self.attention is not None:
            x = x + self.attention(x, x, x, need_weights=False)[0]
        return x if self.head is None else self.head(self.norm(x))


def make_parts() -> list[Part]:
    parts = [Part(index).double() for index in range(4)]
    with torch.no_grad():
        for number, parameter in enumerate(p for part in parts for p in part.parameters()):
            values = random(*parameter.shape, dtype=torch.float64, seed=300 + number)
            parameter.copy_(values * 0.3 + (1.0 if parameter.dim() == 1 and number % 2 else 0.0))
    return parts


def batch(place: int, step: int) -> tuple[Tensor, Tensor]:
    """Of all micro-batches of one rank of the ring: ids and targets [MICRO * ROWS, TOKENS]."""
    generator = torch.Generator().manual_seed(1000 * place + step)
    ids = torch.randint(VOCABULARY, (MICRO * ROWS, TOKENS + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(parts: list[Part], ranks: int, steps: int) -> list[float]:
    """The plain model on the batches of all ranks of a ring. Leaves the last step's gradients."""
    model = nn.Sequential(*parts)
    optimizer, losses = adamw(model.parameters(), lr=0.01), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(loss_of(model(ids), targets) for ids, targets in (batch(place, step) for place in range(ranks)))
        (loss / ranks).backward()
        optimizer.step()
        losses.append(loss.item() / ranks)
    return losses


class Pipeline:
    """The stages of this rank, each on a ring of its own, and their schedule."""

    def __init__(self, schedule: type, stages: dict[int, nn.Module], count: int, mesh, inferred: bool) -> None:
        self.stages, self.ring_group = stages, mesh.get_group("ring")
        made = []
        for index, stage in stages.items():
            rtp_ext.fully_rotate(stage, mesh=mesh["ring"], timeout=60.0)
            ids, hidden = torch.zeros(ROWS, TOKENS, dtype=torch.int64), torch.zeros(ROWS, TOKENS, WIDTH).double()
            logits = torch.zeros(ROWS, TOKENS, VOCABULARY).double()
            taken = ids if index == 0 else hidden.requires_grad_()
            given = (logits if index == count - 1 else hidden).detach().requires_grad_()
            shapes = {} if inferred else {"input_args": (taken,), "output_args": (given,)}
            made.append(PipelineStage(stage, index, count, torch.device("cpu"), group=mesh.get_group("pp"), **shapes))
        several = made[0] if schedule is Schedule1F1B else made
        self.schedule = schedule(several, n_microbatches=MICRO, loss_fn=loss_of)
        self.first, self.last = 0 in stages, count - 1 in stages
        self.optimizer = adamw([p for stage in stages.values() for p in stage.parameters()], lr=0.01)

    def hops(self) -> dict[int, tuple[int, ...]]:
        """By stage: hops of weights, of gradients; those that were sent ahead, and how many of these were used."""
        rings = [rtp_ext.ring_of(stage) for stage in self.stages.values()]
        counts = [(ring.hops("weight"), ring.hops("gradient"), *ring.prefetched()) for ring in rings]
        return dict(zip(self.stages, counts, strict=True))

    def step(self, ids: Tensor, targets: Tensor) -> float | None:
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        arguments = (ids,) if self.first else ()
        self.schedule.step(*arguments, **({"target": targets, "losses": losses} if self.last else {}))
        self.optimizer.step()
        if not self.last:
            return None
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean, group=self.ring_group)
        return mean.item() / dist.get_world_size(self.ring_group)


# with their steps, and whether torch infers the shapes between stages
SCHEDULES = [(Schedule1F1B, 4, False), (ScheduleInterleaved1F1B, 4, True), (ScheduleInterleavedZeroBubble, 10, True)]


def _check(stage: nn.Sequential, plain: nn.Sequential, initial: nn.Sequential) -> None:
    for (name, actual), theirs, before in zip(
        stage.named_parameters(), plain.parameters(), initial.parameters(), strict=True
    ):
        assert_same(full(actual.grad), theirs.grad, TOLERANCE, f"gradient of {name}")
        assert_same(full(actual), theirs, TOLERANCE, name)
        assert differs(theirs, before, 1e-3), f"control: {name} has not changed"


def _trains(rank, ranks, schedules):
    """Two groups of ranks, each with one stage, or with two. Returns the hops of each schedule's last step."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "ring"))
    group, place = mesh.get_coordinate()
    cases, hops = Cases(), {}
    for schedule, steps, inferred in schedules:
        plain, initial, parts = make_parts(), make_parts(), make_parts()
        expected = trained(plain, ranks // 2, steps)
        per_stage = 2 if schedule is Schedule1F1B else 1
        count = 4 // per_stage
        of = {index: slice(index * per_stage, (index + 1) * per_stage) for index in range(group, count, 2)}
        stages = {index: nn.Sequential(*parts[which]) for index, which in of.items()}
        pipeline = Pipeline(schedule, stages, count, mesh, inferred)
        for step in range(steps):
            before = pipeline.hops()
            loss = pipeline.step(*batch(place, step))
            with cases.case(f"{schedule.__name__}: loss of step {step}"):
                assert loss is None or abs(loss - expected[step]) <= TOLERANCE * expected[step]
        for index, stage in stages.items():
            sent = tuple(now - then for now, then in zip(pipeline.hops()[index], before[index], strict=True))
            hops[schedule.__name__, index] = sent
            with cases.case(f"{schedule.__name__}: stage {index}"):
                _check(stage, nn.Sequential(*plain[of[index]]), nn.Sequential(*initial[of[index]]))
        for stage in stages.values():
            rtp_ext.ring_of(stage).close()
    cases.finish()
    return hops


def test_like_one_process():
    for hops in run_ranks(_trains, 4, SCHEDULES):
        for (schedule, index), (weights, gradients, sent, used) in hops.items():
            assert sent == used > 0, f"{schedule}, stage {index}: {used} of {sent} hops that were sent ahead were used"
            if schedule != ScheduleInterleavedZeroBubble.__name__:
                continue
            at_once = hops[ScheduleInterleaved1F1B.__name__, index]
            # The weights of the MLP bundle travel in both backwards; the first stage has one of the usual kind.
            bundle = MICRO if index > 0 else 0
            expected = at_once[0] + bundle, *at_once[1:]
            assert (weights, gradients, sent, used) == expected, f"stage {index}: expected {expected}"


def test_rings_of_three():
    run_ranks(_trains, 6, [(ScheduleInterleavedZeroBubble, 3, False)])
