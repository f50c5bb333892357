"""A language model in parts, its training in one process, and as stages of a pipeline, each on rings of its own."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from harness import Cases
from models import Block
from reference import assert_same, differs, random, whole_parameters
from rounded_travel import Cuts, computing_with, cuts_of
from shards import AdamW, scale_shards
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rtp_ext
from rtp_ext import RotationDims
from rtp_ext.outer.local_training.after_steps import AfterSteps

TOLERANCE = 1e-9
VOCABULARY, WIDTH, TOKENS = 19, 9, 5  # not divisible by 2
MICRO, ROWS = 4, 2
LARGEST_NORM = 0.1  # of the gradients of all stages; those of one stage alone have a smaller one


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return AdamW(parameters, lr=0.01, fused=True)


class Part(nn.Module):
    """One of several parts of a language model. Norms, a stray parameter, linear layers, an MLP bundle, attention."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.positions = nn.Embedding(TOKENS, WIDTH) if index == 1 else None
        self.block = Block(WIDTH, 23)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True) if index == 2 else None
        self.norm = nn.LayerNorm(WIDTH) if index == count - 1 else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if index == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        if self.positions is not None:
            x = x + self.positions(torch.arange(TOKENS))
        x = self.block(x)
        x = x + self.mlp(x)
        if self.attention is not None:
            x = x + self.attention(x, x, x, need_weights=False)[0]
        return x if self.head is None else self.head(self.norm(x))


def tensor_parallel(part: Part, mesh: DeviceMesh) -> None:
    """Attention, positions and norms are whole on every rank."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(
        part, mesh, {path: style for path, style in plan.items() if getattr(part, path.split(".")[0]) is not None}
    )


def make_parts(count: int = 4) -> list[Part]:
    parts = [Part(index, count).double() for index in range(count)]
    with torch.no_grad():
        for number, parameter in enumerate(p for part in parts for p in part.parameters()):
            values = random(*parameter.shape, dtype=torch.float64, seed=300 + number)
            parameter.copy_(values * 0.3 + (1.0 if parameter.dim() == 1 and number % 2 else 0.0))
    return parts


def batch(place: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns all micro-batches of one place of a ring: ids and targets [MICRO * ROWS, TOKENS]."""
    generator = torch.Generator().manual_seed(1000 * place + step)
    ids = torch.randint(VOCABULARY, (MICRO * ROWS, TOKENS + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # stages of torch 2.11 compare strides


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def clip(parameters: Iterable[nn.Parameter], largest: float, group: dist.ProcessGroup) -> tuple[float, float]:
    """Clips by the norm of the gradients of all stages: those of one, and the sum of squares over the pipeline. Returns
    that, and the norm of this rank's stages."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # of all shards of these stages
    squares = norm**2
    dist.all_reduce(squares, group=group)
    total = squares.sqrt()
    scale_shards(parameters, largest, total)
    return total.item(), norm.item()


@functools.cache
def trained(
    count: int, places: int, steps: int, cuts: tuple[tuple[str, Cuts], ...] = (), travel: str | None = None
) -> tuple[list[Part], list[float], list[float]]:
    """The plain model on the batches of all places: its parts, its losses, and the norms of its gradients. `cuts`: of
    weights that travel so, by name."""
    parts = make_parts(count)
    model = nn.Sequential(*parts)
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for step in range(steps):
        optimizer.zero_grad()
        with computing_with(model, dict(cuts), travel):
            loss = sum(loss_of(model(ids), targets) for ids, targets in (batch(place, step) for place in range(places)))
            (loss / places).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM).item())
        optimizer.step()
        losses.append(loss.item() / places)
    return parts, losses, norms


class Pipeline:
    """The stages of this rank, each on rings of its own, and their schedule.

    `mesh`: ("pp", "ring"), with "replicas" between them for a policy made by `outer` for each stage, or with "tp" after
    them. `how`: of the rings.
    """

    def __init__(
        self,
        schedule: type,
        mesh: DeviceMesh,
        parts: int = 4,
        inferred: bool = False,
        outer: Callable[[], Any] | None = None,
        how: Mapping[str, Any] | None = None,
    ) -> None:
        self.mesh, names = mesh, mesh.mesh_dim_names[1:]
        self.batches = mesh[tuple(name for name in names if name != "tp")]
        ranks, rank = mesh.size(0), mesh.get_local_rank("pp")
        per_stage = parts // ranks if schedule is Schedule1F1B else 1
        count = parts // per_stage
        pieces = make_parts(parts)
        mine = (rank, count - 1 - rank) if schedule is ScheduleZBVZeroBubble else range(rank, count, ranks)
        self.slices = {i: slice(i * per_stage, (i + 1) * per_stage) for i in mine}
        self.stages = {index: nn.Sequential(*pieces[which]) for index, which in self.slices.items()}
        made = []
        for index, stage in self.stages.items():
            options = {}
            if "tp" in names:
                options = {"dims": RotationDims()}
                for part in stage:
                    tensor_parallel(part, mesh["tp"])
            elif outer is not None:
                options = {"dims": RotationDims(replicate="replicas"), "outer": outer()}
            place = mesh[names] if how is None else rtp_ext.Ring(mesh[names], timeout=60.0, **how)
            rtp_ext.fully_rotate(stage, mesh=place, timeout=60.0, **options)
            ids, hidden = torch.zeros(ROWS, TOKENS, dtype=torch.int64), torch.zeros(ROWS, TOKENS, WIDTH).double()
            logits = torch.zeros(ROWS, TOKENS, VOCABULARY).double()
            taken = ids if index == 0 else hidden.requires_grad_()
            given = (logits if index == count - 1 else hidden).detach().requires_grad_()
            shapes = {} if inferred else {"input_args": (taken,), "output_args": (given,)}
            made.append(PipelineStage(stage, index, count, torch.device("cpu"), group=mesh.get_group("pp"), **shapes))
        several = made[0] if schedule is Schedule1F1B else made
        self.schedule = schedule(several, n_microbatches=MICRO, loss_fn=loss_of)
        self.first, self.last = 0 in self.stages, count - 1 in self.stages
        self.parameters = [p for stage in self.stages.values() for p in stage.parameters()]
        self.optimizer = adamw(self.parameters)
        for policy in map(rtp_ext.outer_of, self.stages.values()):
            if isinstance(policy, AfterSteps):
                policy.attach(self.optimizer)

    @property
    def place(self) -> int:
        """Returns the index of this rank's batches; ranks of one tensor-parallel group have the same."""
        place = 0
        for name, size in zip(self.batches.mesh_dim_names, self.batches.shape, strict=True):
            place = place * size + self.mesh.get_local_rank(name)
        return place

    def counted(self) -> dict[int, tuple[int, ...]]:
        """By stage: hops of weights, of gradients; those that were sent ahead, and how many of these were used; bytes
        that were sent to other replicas."""
        rings = {index: rtp_ext.ring_of(stage) for index, stage in self.stages.items()}
        sent = {index: rtp_ext.outer_of(stage).bytes_sent() for index, stage in self.stages.items()}
        return {
            index: (ring.hops("weight"), ring.hops("gradient"), *ring.prefetched(), sent[index])
            for index, ring in rings.items()
        }

    def cuts(self) -> tuple[tuple[str, Cuts], ...]:
        """Returns the cuts of the weights of all rotated parts, by name; every rank has to call this."""
        mine = {}
        for index, stage in self.stages.items():
            for name, parameter in stage.named_parameters():
                part, _, rest = name.partition(".")
                if parameter.dim() > 1:
                    mine[f"{self.slices[index].start + int(part)}.{rest}"] = cuts_of(parameter)
        told = [None] * self.mesh.size(0)
        dist.all_gather_object(told, mine, group=self.mesh.get_group("pp"))
        return tuple(sorted(item for theirs in told for item in theirs.items()))

    def backward(self, step: int) -> float | None:
        """All micro-batches. Returns the mean of their losses over all places, where this rank has the last stage."""
        ids, targets = batch(self.place, step)
        losses: list[Tensor] = []
        arguments = (ids,) if self.first else ()
        self.schedule.step(*arguments, **({"target": targets, "losses": losses} if self.last else {}))
        if not self.last:
            return None
        mean = torch.stack(losses).mean()
        for name in self.batches.mesh_dim_names:
            dist.all_reduce(mean, group=self.mesh.get_group(name))
        return mean.item() / self.batches.size()

    def step(self, step: int) -> tuple[float | None, float, float]:
        """The loss, and the norms of the gradients of all stages and of this rank's."""
        self.optimizer.zero_grad()
        loss = self.backward(step)
        norms = clip(self.parameters, LARGEST_NORM, self.mesh.get_group("pp"))
        self.optimizer.step()
        return loss, *norms

    def close(self) -> None:
        for stage in self.stages.values():
            rtp_ext.ring_of(stage).close()


def trains_like_one_process(
    cases: Cases, what: str, pipeline: Pipeline, parts: int, steps: int, travel: str | None = None
) -> dict[int, tuple[int, ...]]:
    """Returns the counts of the last step. Parameters do not show the scale of gradients; norms do. `travel`: the
    format of the weights."""
    rounded = () if travel is None else (pipeline.cuts(), travel)
    plain, losses, norms = trained(parts, pipeline.batches.size(), steps, *rounded)
    initial = make_parts(parts)
    for step in range(steps):
        before = pipeline.counted()
        loss, norm, own = pipeline.step(step)
        with cases.case(f"{what}: step {step}"):
            assert loss is None or abs(loss - losses[step]) <= TOLERANCE * losses[step]
            assert abs(norm - norms[step]) <= TOLERANCE * norms[step], (norm, norms[step])
            assert norm > LARGEST_NORM, "control: nothing is clipped"
            assert norm - own > 100 * TOLERANCE * norm, "control: the norm of this rank's stages would do"
    for index, stage in pipeline.stages.items():
        with cases.case(f"{what}: stage {index}"):
            theirs = nn.Sequential(*plain[pipeline.slices[index]])
            then = nn.Sequential(*initial[pipeline.slices[index]])
            for (name, actual), other, start in zip(
                whole_parameters(stage).items(), theirs.parameters(), then.parameters(), strict=True
            ):
                assert_same(actual, other, TOLERANCE, name)
                assert differs(other, start, 1e-3), f"control: {name} has not changed"
    after = pipeline.counted()
    return {index: tuple(now - then for now, then in zip(after[index], before[index], strict=True)) for index in after}
