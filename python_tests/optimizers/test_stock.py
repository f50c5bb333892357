"""Optimizers of torch on sharded parameters, against the plain model in one process; and their refusals."""

import copy
import re
import sys
from pathlib import Path

import pytest
import torch
from grids import few
from harness import Cases, on_ranks, run_ranks
from optimizer_cases import (
    OURS,
    STOCK,
    Mixed,
    assert_alike,
    assert_trains,
    batch_loss,
    convert,
    maker,
    train,
)
from reference import random
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rtp_ext import RotationDims, fully_rotate, outer_of
from rtp_ext.outer import AllReduce, LocalSGD, ZeroOuter

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
GRID = (2, 2)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
# Optimizers whose steps run on DTensors: DTensor looks up its rules for every operator and shape, which takes long on
# meshes of two dimensions. There each runs one implementation, those of a class on one dimension.
MESHES = [((2,), None), ((3,), None), (GRID, AllReduce), (GRID, ZeroOuter)]


def _ours(name, options):
    return name in ("Rprop", "Adafactor") or "fused" in options


def _trains(rank, ranks, cases_of):
    cases = Cases()
    for shape, outer in cases_of:
        for number, (name, (options, implementations)) in enumerate(STOCK.items()):
            once = few([implementations[number % len(implementations)]], implementations)
            for each in implementations:
                if _ours(name, each) or shape == (2,) or (outer is ZeroOuter and each in once):
                    assert_trains(cases, f"{name} {each}", maker(name, {**options, **each}), rank, shape, outer)
        for name, options in OURS:
            assert_trains(cases, f"{name} {options}", maker(name, options), rank, shape, outer)
    cases.finish()


@pytest.mark.parametrize("cases_of", [MESHES[:1], MESHES[1:2], MESHES[2:3], MESHES[3:]], ids=str)
def test_optimizers_train_as_in_one_process(cases_of):
    run_ranks(_trains, torch.Size(cases_of[0][0]).numel(), cases_of)


def _iterate_in_float64(monkeypatch):
    """Muon rounds its iteration to bfloat16, which would hide errors of shards."""
    module = sys.modules["torch.optim._muon"]
    monkeypatch.setattr(module.Tensor, "bfloat16", lambda self: self.double())


def _muon(model, least):
    matrices = [p for p in model.parameters() if p.dim() == 2 and min(p.shape) >= least]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.SGD(others, lr=0.05)]


@on_ranks(4)
def test_muon_trains_matrices_and_refuses_those_with_fewer_rows_than_ranks(rank, cases):
    with pytest.MonkeyPatch.context() as monkeypatch:
        _iterate_in_float64(monkeypatch)
        for shape, outer in (((4,), None), (GRID, AllReduce), (GRID, ZeroOuter)):
            assert_trains(cases, "Muon", lambda model: _muon(model, 4), rank, shape, outer)
    for shape, outer, few_rows in (((4,), None, "4 ranks"), (GRID, AllReduce, "2 ranks"), (GRID, ZeroOuter, "4 ranks")):
        model = convert(Mixed(), shape, outer() if outer else None)
        with (
            cases.case(f"Muon of a row, {shape}"),
            pytest.raises(ValueError, match=rf"{few_rows} share, got a parameter of shape \(1, 7\): .*AdamW"),
        ):
            train(model, _muon(model, 1), [rank])


class _Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 5, sparse=True)
        self.inner = Mixed()
        self.double()
        with torch.no_grad():
            self.table.weight.copy_(random(7, 5, dtype=torch.float64, seed=9))

    def forward(self, x):
        return self.inner(self.table(x.argmax(-1)) + x)


@on_ranks(2)
def test_steps_with_closures_hooks_plain_parameters_and_scalers(rank, ranks, cases):
    """Cases that need no separate mesh, on a ring of two."""
    with cases.case("SparseAdam"):
        make = lambda model: [  # noqa: E731
            torch.optim.SparseAdam(model.table.parameters(), lr=0.05),
            torch.optim.SGD(model.inner.parameters(), lr=0.05, fused=True),
        ]
        plain, model = _Looked(), _Looked()
        convert(model, (ranks,))
        train(plain, make(plain), range(ranks))
        train(model, make(model), [rank])
        assert_alike(model, plain)
    for name in ("Rprop", "Adafactor"):
        with cases.case(f"{name} of plain parameters and shards together"):
            plain, model = Mixed(), Mixed()
            convert(model, (ranks,))
            for each in (plain, model):
                each.stray = nn.Parameter(torch.full((3, 3), 0.5, dtype=torch.float64))
            optimizers = [getattr(torch.optim, name)(each.parameters(), lr=0.01) for each in (plain, model)]
            for step in range(3):
                for each, optimizer, batches in zip((plain, model), optimizers, (range(ranks), [rank]), strict=True):
                    optimizer.zero_grad()
                    loss = sum(batch_loss(each, one, step) for one in batches) / len(batches)
                    (loss + (each.stray**2).sum()).backward()
                    optimizer.step()
            assert_alike(model, plain)
    for name, options in (("SGD", {"lr": 0.05, "fused": True}), ("Rprop", {"lr": 0.01}), ("Adafactor", {"lr": 0.05})):
        with cases.case(f"{name}: a closure computes the gradients, a hook and a schedule change the step"):
            plain, model = Mixed(), convert(Mixed(), (ranks,))
            losses = []
            for each, batches in ((plain, range(ranks)), (model, [rank])):
                optimizer = getattr(torch.optim, name)(each.parameters(), **options)

                def halve(optimizer, *_):
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.5

                optimizer.register_step_pre_hook(halve)
                for step in range(3):

                    def closure(each=each, batches=batches, step=step, optimizer=optimizer):
                        optimizer.zero_grad()
                        loss = sum(batch_loss(each, one, step) for one in batches) / len(batches)
                        loss.backward()
                        return loss

                    losses.append(optimizer.step(closure))
                assert optimizer.param_groups[0]["lr"] == options["lr"] / 8
            assert all(isinstance(loss, torch.Tensor) for loss in losses)
            assert_alike(model, plain)
        with cases.case(f"{name}: a step that fails leaves the optimizer as it was"):
            model = convert(Mixed(), (ranks,))
            (optimizer,) = maker(name, options)(model)

            def fails():
                raise KeyError("of the closure")

            with pytest.raises(KeyError, match="of the closure"):
                optimizer.step(fails)
            assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
            plain = Mixed()
            train(plain, maker(name, options)(plain), range(ranks))
            train(model, [optimizer], [rank])
            assert_alike(model, plain)
    with cases.case("fused SGD and GradScaler"):
        plain, model = Mixed(), convert(Mixed(), (ranks,))
        for each, batches in ((plain, range(ranks)), (model, [rank])):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9, fused=True)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            for step in range(4):
                optimizer.zero_grad()
                loss = sum(batch_loss(each, one, step) for one in batches) / len(batches)
                # the gradient of the second rank alone overflows in the second step
                scaler.scale(loss * (float("inf") if step == 1 and 1 in batches else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 8.0
        assert_alike(model, plain)


def _saves(rank, ranks, shape, outers):
    """Optimizer state is made of DTensors, as that of torch's steps, and goes on after it has been saved whole."""
    cases = Cases()
    for outer in outers:
        for name, options in (
            ("SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}),
            ("Adagrad", {"lr": 0.05, "fused": True}),
            ("Rprop", {"lr": 0.01}),
            ("Adafactor", {"lr": 0.05}),
        ):
            with cases.case(f"{name} {outer}"):
                plain, model, again = Mixed(), *(convert(Mixed(), shape, outer() if outer else None) for _ in "12")
                (optimizer,), (expected,) = (maker(name, options)(each) for each in (model, plain))
                train(plain, [expected], range(ranks), 3)
                train(model, [optimizer], [rank], 3)
                for parameter, state in optimizer.state.items():
                    assert state, f"no state of a parameter of shape {tuple(parameter.shape)}"
                    for key, value in state.items():
                        assert isinstance(value, DTensor) == (key != "step"), (key, type(value))
                    for key in state.keys() - {"step", "row_var", "col_var"}:
                        assert state[key].placements == parameter.placements, (key, state[key].placements)
                whole = get_optimizer_state_dict(model, optimizer, options=WHOLE)
                with torch.no_grad():
                    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
                        ours.copy_(theirs)
                (resumed,) = maker(name, options)(again)
                parts = [whole if rank == 0 else {}]
                torch.distributed.broadcast_object_list(parts)
                set_optimizer_state_dict(again, resumed, copy.deepcopy(parts[0]), options=WHOLE)
                train(plain, [expected], range(ranks), 2, first=3)
                train(again, [resumed], [rank], 2, first=3)
                assert_alike(again, plain)
                # Whole state, loaded as a plain optimizer's, is not what a rank steps on.
                if outer is None or outer is AllReduce:
                    (other,) = maker(name, options)(again)
                    other.load_state_dict(copy.deepcopy(expected.state_dict()))
                    with pytest.raises(ValueError, match=r"plain tensor of the whole shape: .*set_optimizer_state"):
                        train(again, [other], [rank], 1)
    cases.finish()


@pytest.mark.parametrize(("shape", "outers"), [((2,), [None]), (GRID, [AllReduce, ZeroOuter])], ids=str)
def test_state_is_saved_and_loaded(shape, outers):
    run_ranks(_saves, torch.Size(shape).numel(), shape, outers)


@on_ranks(4)
def test_replicas_that_train_apart_have_statistics_of_their_own(rank, cases):
    """Replicas with local training have separate statistics: each is a ring; the reference is two models in one
    process."""
    for name, options in (("Adafactor", {"lr": 0.05}), ("Rprop", {"lr": 0.01})):
        with cases.case(name):
            workers = [Mixed() for _ in range(2)]
            for number, worker in enumerate(workers):
                train(worker, maker(name, options)(worker), range(2 * number, 2 * number + 2), 3)
            model = convert(Mixed(), GRID, LocalSGD(period=4))
            optimizers = maker(name, options)(model)
            outer_of(model).attach(optimizers[0])
            train(model, optimizers, [rank], 3)
            assert_alike(model, workers[rank // 2])


class _Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)
        self.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))

    def forward(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))


@on_ranks(4)
def test_shards_of_tensor_parallel_parts(rank, cases):
    """Two rings of two, each of one half of what tensor parallelism has cut, whose ranks have the same batch."""
    mesh = init_device_mesh("cpu", GRID, mesh_dim_names=("ring", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for name, options in (("Adafactor", {"lr": 0.05}), ("Rprop", {"lr": 0.01}), ("SGD", {"lr": 0.05, "fused": True})):
        with cases.case(name):
            plain, model = _Parallel(), parallelize_module(_Parallel(), mesh["tp"], plan)
            fully_rotate(model, mesh=mesh, dims=RotationDims(ring="ring"), timeout=30.0)
            train(plain, maker(name, options)(plain), range(2))
            train(model, maker(name, options)(model), [rank // 2])
            assert_alike(model, plain)


@on_ranks(2)
def test_what_cannot_train_shards_is_refused_by_name(rank, ranks, cases):
    model = convert(Mixed(), (ranks,))
    batch_loss(model, rank, 0).backward()
    base = type("Optimizer8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.optimizer"})
    for cls, words in (
        (torch.optim.LBFGS, "torch's LBFGS .* loss of one rank, .* Use torch.optim.AdamW"),
        (type("Adafactor", (torch.optim.SGD,), {"__module__": "transformers.optimization"}), "torch.optim.Adafactor"),
        (type("AdamW8bit", (base,), {"__module__": "bitsandbytes.optim.adamw"}), "torchao.optim.AdamW8bit"),
    ):
        optimizer = cls(model.parameters(), lr=0.1)
        with cases.case(cls.__name__), pytest.raises(ValueError, match=words):
            optimizer.step(lambda: batch_loss(model, rank, 0))
        plain = Mixed()
        optimizer = cls(plain.parameters(), lr=0.1)
        with cases.case(f"{cls.__name__} of a plain model"):
            optimizer.step(lambda plain=plain: batch_loss(plain, rank, 0))


def test_the_page_names_every_optimizer_of_torch():
    rows = dict(re.findall(r"^\| `torch\.optim\.(\w+)` \| (\w+)", PAGE.read_text(), re.MULTILINE))
    found = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    assert rows.keys() == found
    assert {name for name, verdict in rows.items() if verdict == "works"} == {*STOCK, "Muon", "SparseAdam"}
    assert {name for name, verdict in rows.items() if verdict == "refused"} == {"LBFGS"}
    assert [name for name, cls in STOCK.items() if not cls[1]] == []
