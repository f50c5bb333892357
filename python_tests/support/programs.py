"""Random training programs, on a ring and in one process: a seed says all of a program, and both do the same.

    check(rank, ranks, seed)
    check(rank, ranks, seed, brief=True)

A program is a model of random blocks (some checkpointed, some frozen, the head tied or not), a ring with random options
on a random mesh, and a list of actions: steps of one or more micro-batches, of different sizes and empty on some ranks,
evaluations, forwards without a backward, parameters that are frozen or thawed, clipping, a state dict that is saved and
loaded into a model with other options, ranks that are late. A brief one has a single block of one of few sizes, and two
actions: DTensor, which looks long at every new shape, knows those of the ones before.
"""

from __future__ import annotations

import copy
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from reference import full, wholes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import rtp_ext

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}  # of the largest magnitude, after all steps
WHOLE = StateDictOptions(full_state_dict=True)
CHECKPOINTED = (None, None, True, False)
ACTIONS = ("step", "step", "step", "accumulate", "clip", "evaluate", "forward", "freeze", "reload", "nap")


@dataclass
class Program:
    """All that a seed says."""

    seed: int
    ranks: int
    dtype: torch.dtype
    width: int
    vocabulary: int
    blocks: list[tuple[str, int, bool | None]]  # kind, hidden size, how it is checkpointed
    tied: bool
    frozen: set[int]  # of the parameters, by number
    replicas: int
    options: list[dict[str, Any]]  # of the rings, one after the other
    actions: list[str] = field(default_factory=list)

    @classmethod
    def draw(cls, seed: int, ranks: int, brief: bool = False) -> Program:
        draw = random.Random(seed * 1009 + ranks)
        kinds = ("mlp", "linear", "attention", "convolution", "norm", "experts")
        blocks = [
            (draw.choice(kinds), draw.choice((3, 8)) if brief else draw.randint(1, 13), draw.choice(CHECKPOINTED))
            for _ in range(1 if brief else draw.randint(1, 3))
        ]
        actions = [draw.choice(ACTIONS) for _ in range(2 if brief else draw.randint(4, 7))]
        return cls(
            seed=seed,
            ranks=ranks,
            dtype=draw.choice((torch.float64, torch.float64, torch.float32)),
            width=draw.choice((4, 6)) if brief else 2 * draw.randint(1, 6),
            vocabulary=7 if brief else draw.randint(2, 17),
            blocks=blocks,
            tied=draw.random() < 0.4,
            frozen={n for n in range(12) if draw.random() < 0.15},
            replicas=draw.choice((1, 2)) if ranks % 2 == 0 else 1,
            options=[cls.ring_options(draw) for _ in range(1 + actions.count("reload"))],
            actions=actions,
        )

    @staticmethod
    def ring_options(draw: random.Random) -> dict[str, Any]:
        return {
            "transport": draw.choice(("shm", "tcp", "c10d")),
            "route": draw.choice(("auto", "ring", "direct", "gather")),
            "prefetch": draw.choice((0, 1)),
            "gradient_halves": draw.choice((None, False, True)),
            "late_gradients": draw.choice((None, 0, 2)),
            "slot_cap": draw.choice((0, 100, 1 << 20)),
            "checksum": draw.random() < 0.3,
            "in_place": draw.random() < 0.3,
            "bundle": draw.choice((True, False, "recompute")),
        }


class Block(nn.Module):
    """A residual around one kind of layer."""

    def __init__(self, kind: str, width: int, hidden: int, checkpointed: bool | None) -> None:
        super().__init__()
        self.kind, self.checkpointed = kind, checkpointed
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))
        if kind == "mlp":
            self.inner: nn.Module = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        elif kind == "attention":
            self.inner = nn.MultiheadAttention(width, 2, batch_first=True)
        elif kind == "convolution":
            self.inner = nn.Conv1d(width, width, 3, padding=1)
        elif kind == "experts":
            self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        else:
            self.inner = nn.Linear(width, width, bias=hidden % 2 == 0)

    def compute(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.kind == "attention":
            return x + self.scale * self.inner(y, y, y, need_weights=False)[0]
        if self.kind == "convolution":
            return x + self.scale * self.inner(y.transpose(1, 2)).transpose(1, 2)
        if self.kind == "norm":
            return x + self.scale * y
        if self.kind == "experts":  # all of them, each weighed by its token
            first, second = self.inner
            return x + self.scale * (torch.sigmoid(y) * first(y) + torch.tanh(y) * second(y))
        return x + self.scale * self.inner(y)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None or not torch.is_grad_enabled():
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.checkpointed)


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.embed = nn.Embedding(program.vocabulary, program.width)
        self.blocks = nn.ModuleList(Block(kind, program.width, *rest) for kind, *rest in program.blocks)
        self.head = nn.Linear(program.width, program.vocabulary, bias=False)
        if program.tied:
            self.head.weight = self.embed.weight
        self.to(program.dtype)
        generator = torch.Generator().manual_seed(program.seed)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.3 * noise + (parameter.dim() < 2))
                parameter.requires_grad_(number not in program.frozen)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run:
    """A program on this rank: the model on a ring, and the plain one, which sees the batches of all ranks."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank, self.program = rank, program
        self.draw = random.Random(program.seed)  # the same on all ranks
        self.rings: list[rtp_ext.Ring] = []
        self.plain = Model(program)
        self.model = self.convert(Model(program))
        self.optimizers = self.make_optimizers()
        self.micro = 0

    def convert(self, model: nn.Module) -> nn.Module:
        options = dict(self.program.options[len(self.rings)])
        mine = {name: options.pop(name) for name in ("in_place", "bundle")}
        if self.program.replicas == 2 and self.program.ranks > 2:
            mesh = init_device_mesh("cpu", (2, self.program.ranks // 2), mesh_dim_names=("replicas", "ring"))
            options["dims"] = rtp_ext.RotationDims(ring="ring", replicate="replicas")
            mine["dims"] = options["dims"]
        else:
            mesh = init_device_mesh("cpu", (self.program.ranks,))
        dims = options.pop("dims", None)
        ring = rtp_ext.Ring(mesh, dims=dims, timeout=60.0, **options)
        mine.pop("dims", None)
        self.rings.append(ring)
        return rtp_ext.fully_rotate(model, mesh=ring, **mine)

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.5)
            for model in (self.model, self.plain)
            if any(p.requires_grad for p in model.parameters())
        ]

    def batch(self, rank: int, micro: int) -> tuple[Tensor, Tensor]:
        """ids and targets [sequences, tokens]; of some ranks there are no sequences."""
        draw = random.Random(self.program.seed * 7919 + 131 * rank + micro)
        shape = (draw.choice((0, 1, 2, 3)), 1 + (self.program.seed + micro) % 5)
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        return tuple(torch.randint(self.program.vocabulary, shape, generator=generator) for _ in range(2))

    def both(self, grad: bool) -> tuple[Tensor, Tensor]:
        """The loss of this rank by its own model, and the mean of all by the plain one; compares this rank's."""
        micro, ranks = self.micro, self.program.ranks
        self.micro += 1
        with torch.set_grad_enabled(grad):
            ids, targets = self.batch(self.rank, micro)
            ours = loss(self.model(ids), targets)
            batches = [self.batch(rank, micro) for rank in range(ranks)]
            outputs = self.plain(torch.cat([ids for ids, _ in batches])).split([len(ids) for ids, _ in batches])
            every = [loss(output, targets) for output, (_, targets) in zip(outputs, batches, strict=True)]
        self.compare(ours, every[self.rank], f"loss of micro-batch {micro}", floor=1.0)
        return ours, torch.stack(every).sum() / ranks

    def compare(self, ours: Tensor, theirs: Tensor, what: str, floor: float = 0.1) -> None:
        ours, theirs = ours.detach().double(), theirs.detach().double()
        assert ours.shape == theirs.shape, f"{self.program}: {what}: {ours.shape}, {theirs.shape}"
        if theirs.numel() == 0:
            return
        allowed = TOLERANCE[self.program.dtype] * max(floor, theirs.abs().max().item())
        error = (ours - theirs).abs().max().item()
        assert error <= allowed, f"{self.program}: {what}: error {error:.3g} exceeds {allowed:.3g}"

    def backward(self) -> None:
        for loss in self.both(True):
            if loss.requires_grad:
                loss.backward()

    def end_step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    # -- actions -----------------------------------------------------------------------------------------------------

    def do_step(self) -> None:
        self.backward()
        self.end_step()

    def do_accumulate(self) -> None:
        for _ in range(self.draw.randint(2, 3)):
            self.backward()
        self.end_step()

    def do_clip(self) -> None:
        self.backward()
        norms = [
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
            for model in (self.model, self.plain)
        ]
        self.compare(*map(full, norms), "gradient norm")
        self.end_step()

    def do_evaluate(self) -> None:
        self.both(False)

    def do_forward(self) -> None:
        self.both(True)  # and no backward

    def do_freeze(self) -> None:
        number = self.draw.randrange(sum(1 for _ in self.plain.parameters()))
        for model in (self.model, self.plain):
            parameter = list(model.parameters())[number]
            parameter.requires_grad_(not parameter.requires_grad)
        self.optimizers = self.make_optimizers()

    def do_reload(self) -> None:
        whole = get_model_state_dict(self.model, options=WHOLE)
        for name, value in self.plain.state_dict().items():
            self.compare(whole[name], value, f"{name} of the state dict")
        model = Model(self.program)
        with torch.no_grad():
            for parameter, known in zip(model.parameters(), self.plain.parameters(), strict=True):
                parameter.mul_(-1.5).requires_grad_(known.requires_grad)
        model = self.convert(model)
        set_model_state_dict(model, copy.deepcopy(whole), options=WHOLE)
        self.model = model
        self.optimizers = self.make_optimizers()

    def do_nap(self) -> None:
        if self.rank == self.draw.randrange(self.program.ranks):
            time.sleep(0.02)

    def run(self) -> None:
        for action in self.program.actions:
            getattr(self, f"do_{action}")()
        for ours, (name, theirs) in zip(wholes(self.model.parameters()), self.plain.named_parameters(), strict=True):
            self.compare(ours, theirs, name)

    def close(self) -> None:
        for ring in self.rings:
            ring.close()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 4


def check(rank: int, ranks: int, seed: int, brief: bool = False) -> int:
    """Runs the program of `seed`; AssertionError where a number differs. Returns how many actions it had."""
    run = Run(rank, Program.draw(seed, ranks, brief))
    try:
        run.run()
    except AssertionError:
        raise
    except Exception as error:
        raise RuntimeError(f"{run.program}: {type(error).__name__}: {error}") from error
    finally:
        run.close()
    return len(run.program.actions)
