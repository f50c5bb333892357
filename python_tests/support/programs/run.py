"""Runs a random program on a ring and in one process."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from reference import full, wholes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import rtp_ext
from programs.drawn import SWAPS, Program
from programs.model import Model, fill, loss
from programs.twins import Twin
from programs.workers import Compressed, Workers, nothing
from rtp_ext.outer import ZeroOuter

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}  # of the largest magnitude, after all steps
WHOLE = StateDictOptions(full_state_dict=True)


class Run:
    """A program on this rank: the model on a ring, and plain workers, which see the batches of all ranks."""

    timeout = 60.0

    def __init__(self, rank: int, program: Program) -> None:
        self.rank, self.program = rank, program
        self.draw = random.Random(program.seed)  # the same on all ranks
        self.rings: list[rtp_ext.Ring] = []
        apart = program.rule is not None
        self.workers = Workers(
            [Model(program) for _ in range(program.replicas if apart else 1)], program.rule or nothing
        )
        self.number = rank // program.ring if apart else 0  # of the worker that this rank's replica is compared with
        self.micro = 0
        self.take(self.convert(Model(program)))

    @property
    def plain(self) -> nn.Module:
        return self.workers.models[self.number]

    @property
    def both_models(self) -> list[nn.Module]:
        return [self.model, *self.workers.models]

    def convert(self, model: nn.Module) -> nn.Module:
        options = dict(self.program.options[len(self.rings)])
        mine = {name: options.pop(name) for name in ("in_place", "bundle")}
        if options.pop("offload", False):
            mine["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if self.program.replicas > 1:
            shape = self.program.replicas, self.program.ring
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "ring"))
            options["dims"] = rtp_ext.RotationDims(ring="ring", replicate="replicas")
            mine["outer"] = self.program.outer
        else:
            mesh = init_device_mesh("cpu", (self.program.ranks,))
        ring = rtp_ext.Ring(mesh, timeout=self.timeout, **options)
        self.rings.append(ring)
        return rtp_ext.fully_rotate(model, mesh=ring, **mine)

    def take(self, model: nn.Module) -> None:
        """Trains this model from now on."""
        backend = self.program.backend
        self.model = model
        self.call = model if backend is None else torch.compile(model, backend=backend)
        self.policy = rtp_ext.outer_of(model)
        compressor = self.program.compressor
        self.compressed = None if compressor is None else Compressed(compressor, self.program.ring)
        cut = zip(self.plain.parameters(), model.parameters(), strict=True)
        self.dims = {plain: getattr(getattr(p, "placements", [None])[-1], "dim", None) for plain, p in cut}
        self.whole: set[nn.Parameter] = set()  # of the plain model, those that every rank holds whole
        self.workers.restart()
        self.rebuilt()

    def rebuilt(self) -> None:
        """The models have other parameters, or other ones that are trained."""
        self.optimizers = self.make_optimizers()
        self.twin = Twin(self.program.twin, self.both_models) if self.program.twin else None

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        how = {"foreach": self.program.steps == "foreach"}
        made = []
        for model in self.both_models:
            trained = [p for p in model.parameters() if p.requires_grad]
            if not trained:
                continue
            kinds = ([p for p in trained if isinstance(p, DTensor) == cut] for cut in (True, False))
            groups = [{"params": kind} for kind in kinds if kind]
            made.append(torch.optim.SGD(groups, lr=0.05, momentum=0.5, **how))
        if made and self.program.rule is not None:
            self.policy.attach(made[0])
        return made

    # -- losses and gradients ----------------------------------------------------------------------------------------

    def batch(self, rank: int, micro: int) -> tuple[Tensor, Tensor]:
        """ids and targets [sequences, tokens]; of some ranks there are no sequences."""
        draw = random.Random(self.program.seed * 7919 + 131 * rank + micro)
        shape = (draw.choice((0, 1, 2, 3)), 1 + (self.program.seed + micro) % 5)
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        return tuple(torch.randint(self.program.vocabulary, shape, generator=generator) for _ in range(2))

    def both(self, grad: bool, models: list[nn.Module] | None = None) -> tuple[Tensor, list[Tensor]]:
        """The loss of this rank by its own model, and the losses of all ranks by the plain ones; compares this rank's.
        `models`: others than those that are trained."""
        micro = self.micro
        self.micro += 1
        model, *plain = models or [self.call, *self.workers.models]
        with torch.set_grad_enabled(grad):
            ids, targets = self.batch(self.rank, micro)
            ours = loss(model(ids), targets)
            every: list[Tensor] = []
            for ranks, worker in zip(self.ranks_of_workers(), plain, strict=True):
                batches = [self.batch(rank, micro) for rank in ranks]
                outputs = worker(torch.cat([ids for ids, _ in batches])).split([len(ids) for ids, _ in batches])
                every += [loss(output, targets) for output, (_, targets) in zip(outputs, batches, strict=True)]
        self.compare(ours, every[self.rank], f"loss of micro-batch {micro}", floor=1.0)
        return ours, every

    def ranks_of_workers(self) -> Iterator[range]:
        """The ranks whose batches each worker sees."""
        size = self.program.ranks // len(self.workers.models)
        return (range(number * size, (number + 1) * size) for number in range(len(self.workers.models)))

    def compare(self, ours: Tensor, theirs: Tensor, what: str, floor: float = 0.1) -> None:
        ours, theirs = ours.detach().double(), theirs.detach().double()
        assert ours.shape == theirs.shape, f"{self.program}: {what}: {ours.shape}, {theirs.shape}"
        if theirs.numel() == 0:
            return
        allowed = TOLERANCE[self.program.dtype] * max(floor, theirs.abs().max().item())
        error = (ours - theirs).abs().max().item()
        assert error <= allowed, f"{self.program}: {what}: error {error:.3g} exceeds {allowed:.3g}"

    def backward(self, reduces: bool = True, before: list[list[Tensor]] | None = None) -> list[list[Tensor]]:
        """`before`: the plain losses of micro-batches that were not reduced. Returns those that were not yet."""
        rtp_ext.set_requires_all_reduce(self.model, reduces)
        ours, every = self.both(True)
        if ours.requires_grad:
            ours.backward()
        unreduced = [*(before or []), every]
        if not every[0].requires_grad or not reduces:
            return unreduced
        if self.compressed is not None:
            self.backward_compressed([torch.stack(each).sum(0) for each in zip(*unreduced, strict=True)])
            return []
        for ranks in self.ranks_of_workers():
            (sum(torch.stack([losses[rank] for rank in ranks]).sum() for losses in unreduced) / len(ranks)).backward()
        return []

    def backward_compressed(self, losses: list[Tensor]) -> None:
        """`losses`: of every rank, of all micro-batches."""
        assert self.compressed is not None, "called where gradients are compressed"
        trained = [p for p in self.plain.parameters() if p.requires_grad]
        size, gradients = self.program.ring, []
        for replica in range(self.program.replicas):
            total = torch.stack(losses[replica * size : (replica + 1) * size]).sum() / size
            gradients.append(self.gradients_of(total, trained))
        for parameter, each in zip(trained, zip(*gradients, strict=True), strict=True):
            if parameter in self.whole:  # averaged as it is
                mean = torch.stack(each).mean(0)
            else:
                mean = self.compressed.mean(parameter, each, self.dims[parameter])
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    @staticmethod
    def gradients_of(total: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
        """By a whole backward: reentrant checkpoints refuse torch.autograd.grad."""
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        total.backward(retain_graph=True)
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        return found

    def end_step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.optimizers:
            self.workers.end_step()
        if self.twin is not None:
            self.twin.follow()

    # -- actions -----------------------------------------------------------------------------------------------------

    def do_step(self) -> None:
        self.backward()
        self.end_step()

    def do_turns(self) -> None:
        """So many steps in a row that hops run ahead across the end of a forward."""
        for _ in range(10):
            self.do_step()

    def do_accumulate(self) -> None:
        for _ in range(self.draw.randint(2, 3)):
            self.backward()
        self.end_step()

    def do_unreduced(self) -> None:
        """Runs micro-batches and reduces only the last one over replicas."""
        waiting = self.backward(False)
        if self.draw.random() < 0.5:
            waiting = self.backward(False, waiting)
        self.backward(True, waiting)
        self.end_step()

    def do_clip(self) -> None:
        self.backward()
        if all(isinstance(p, DTensor) for p in self.model.parameters()):  # else there is no norm of all
            norms = [
                nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
                for model in self.both_models
            ]
            self.compare(full(norms[0]), norms[1 + self.number], "gradient norm")
        self.end_step()

    def do_evaluate(self) -> None:
        self.both(False)

    def do_forward(self) -> None:
        self.both(True)  # and no backward

    def do_freeze(self) -> None:
        if "DiLoCo" in self.program.policy:  # which leaves out frozen parameters, unlike the workers
            return
        number = self.draw.randrange(sum(1 for _ in self.plain.parameters()))
        for model in self.both_models:
            parameter = list(model.parameters())[number]
            parameter.requires_grad_(not parameter.requires_grad)
        self.optimizers = self.make_optimizers()

    def do_reload(self) -> None:
        self.do_average()
        whole = get_model_state_dict(self.model, options=WHOLE)
        for name, value in self.plain.state_dict().items():
            self.compare(whole[name], value, f"{name} of the state dict")
        model = copy.deepcopy(self.plain)  # whose modules may have been swapped
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
                parameter.grad = None
        model = self.convert(model)
        if len({*model.modules()}) == sum(1 for _ in model.named_modules(remove_duplicate=False)):
            set_model_state_dict(model, copy.deepcopy(whole), options=WHOLE)
        else:  # torch leaves out the second name of a module that is shared
            model.load_state_dict(copy.deepcopy(whole), assign=True)
        self.take(model)

    def do_average(self) -> None:
        """All replicas get the mean of their weights, and of the state of their optimizers."""
        if self.program.rule is None or not self.optimizers:
            return
        self.policy.average()
        self.workers.average(self.optimizers[1:])

    def do_twin(self) -> None:
        """Evaluates the moving average."""
        if self.twin is not None:
            with self.twin.models() as models:
                self.both(False, models)

    def do_swap(self) -> None:
        """Replaces modules of the converted model, the same on every rank."""
        kind = self.draw.choice(SWAPS)
        blocks = len(self.plain.blocks)
        first, second = self.draw.randrange(blocks), self.draw.randrange(blocks)
        if kind in ("plain", "rotated") and (isinstance(self.policy, ZeroOuter) or self.program.rule is not None):
            kind = "exchanged"  # parameters that join later are refused
        if "DiLoCo" in self.program.policy and self.workers.step:  # whose anchors go by names
            return
        seed = self.draw.randrange(1 << 30)
        for model in self.both_models:
            one, other = model.blocks[first], model.blocks[second]
            if kind == "exchanged":
                model.blocks[first], model.blocks[second] = other, one
            elif kind == "gone":
                one.kind = "norm"
                one.inner = nn.Identity()
            elif kind == "shared":
                one.kind, one.inner = other.kind, other.inner
            else:
                fresh = nn.Linear(self.program.width, self.program.width).to(self.program.dtype)
                fill(fresh, seed)
                if kind == "rotated" and model is self.model:
                    fresh = rtp_ext.fully_rotate(fresh, mesh=self.rings[-1], outer=self.outer_of_parts())
                elif model is not self.model:
                    self.whole |= set(fresh.parameters()) if kind == "plain" else set()
                    self.dims |= dict.fromkeys(fresh.parameters(), 0)
                one.kind, one.inner = "linear", fresh
        self.rebuilt()

    def outer_of_parts(self) -> Any:
        return self.policy if self.program.replicas > 1 else None

    def do_nap(self) -> None:
        if self.rank == self.draw.randrange(self.program.ranks):
            time.sleep(0.02)

    # ----------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for action in self.program.actions:
            getattr(self, f"do_{action}")()
        self.compare_parameters(self.model, self.plain, "")
        if self.twin is not None:
            with self.twin.models() as models:
                self.compare_parameters(models[0], models[1 + self.number], "moving average of ")

    def compare_parameters(self, model: nn.Module, plain: nn.Module, what: str) -> None:
        for ours, (name, theirs) in zip(wholes(model.parameters()), plain.named_parameters(), strict=True):
            self.compare(ours, theirs, what + name)

    def close(self) -> None:
        for ring in self.rings:
            ring.close()
