"""Optimizers of other packages on shards: what is refused, and the plain model in one process as the reference."""

import copy
import functools
import random as python_random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import Cases, on_ranks, run_ranks
from optimizer_cases import Mixed, assert_alike, assert_trains, batch_loss, convert, mesh_of, train
from reference import assert_same, differs, full, random, wholes
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import rtp_ext
from rtp_ext import outer_of
from rtp_ext.optim import on_shards
from rtp_ext.outer import LocalSGD, ZeroOuter

GRID = (2, 2)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Own(Optimizer):
    """A momentum step that uses operations which DTensor mixes up with plain tensors."""

    def __init__(self, params, lr=0.05, momentum=0.9, kind="plain"):
        super().__init__(params, {"lr": lr, "momentum": momentum, "kind": kind})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group, loss)
        return loss

    def update(self, p, state, group, loss):
        if not state:
            state["step"], state["mean"] = torch.zeros(1), torch.zeros(p.shape, dtype=p.dtype)
        state["step"] += 1
        gradient = p.grad
        if group["kind"] == "norm":
            gradient = gradient / gradient.norm().clamp(min=1.0)  # takes effect for large gradients only
        state["mean"].mul_(group["momentum"]).add_(gradient)
        # a new plain tensor, and a write that raises no version
        p.data.sub_(torch.ones(p.shape, dtype=p.dtype) * state["mean"], alpha=group["lr"])


def _variant(name, update, base=Own, **more):
    return type(name, (base,), {"update": update, **more})


def _plain(p, group, amount):
    p.sub_(amount, alpha=group["lr"])


def _centered(self, p, state, group, loss):
    _plain(p, group, p.grad - p.grad.mean(-1, keepdim=True) if p.dim() > 1 else p.grad)


def _trust(self, p, state, group, loss):
    _plain(p, group, p.grad * p.norm())


def _clipped(self, p, state, group, loss):
    _plain(p, group, p.grad / (p.grad.norm() / 1e4).clamp(min=1.0))


def _late_size(self, p, state, group, loss):
    _plain(p, group, p.grad / (p.grad.norm() if p.numel() > 30000 else 1.0))


def _factors(self, p, state, group, loss):
    state.setdefault("row", torch.zeros(p.shape[:1], dtype=p.dtype)).add_(1.0)
    _plain(p, group, p.grad)


def _lists(self, p, state, group, loss):
    state.setdefault("queue", []).append(p.grad.clone())
    _plain(p, group, state["queue"][-1])


def _noise(self, p, state, group, loss):
    _plain(p, group, p.grad + torch.randn_like(p))


def _by_loss(self, p, state, group, loss):
    _plain(p, group, p.grad * (1.0 if loss is None else float(loss)))


def _by_identity(self, p, state, group, loss):
    known = self.__dict__.setdefault("known", {}).setdefault(id(p), torch.zeros_like(p))
    _plain(p, group, known.add_(p.grad))


def _replaces(self, p, state, group, loss):
    p.data = p.data - group["lr"] * p.grad


def _statistics(self, p, state, group, loss):
    state["norm"] = p.grad.norm()
    _plain(p, group, p.grad)


def _of_all(self, p, state, group, loss):
    self.state["largest"] = max(self.state.get("largest", 0.0), float(p.grad.abs().max()) if p.numel() else 0.0)
    _plain(p, group, p.grad)


def _fails(self, p, state, group, loss):
    raise KeyError("of its own")


def _still(self, p, state, group, loss):
    pass


def _infinite(self, p, state, group, loss):
    _plain(p, group, p.grad / 0.0)


class _Twice(Own):
    def step(self, closure=None):
        if closure is not None:
            closure()
        return super().step(closure)


class _Inner(Own):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self.inner.step()
        return loss


REFUSED = [
    (_variant("Centered", _centered), r"Centered does not act .* \[7, 5\] in 3 parts along dimension 1"),
    (_variant("Trust", _trust), r"Trust does not act on each number by itself: numbers of a parameter \[7\]"),
    (_variant("Clipped", _clipped), r"Clipped does not act on each number by itself"),
    (_variant("LateSize", _late_size), r"parameter \[260, 263\] in 3 parts"),
    (_variant("Factors", _factors), r"keeps state 'row' of shape \[7\] of a parameter \[7, 5\]"),
    (_variant("Lists", _lists), r"keeps tensors in a list, state 'queue'"),
    (_variant("Noise", _noise), r"draws random numbers"),
    (_variant("ByLoss", _by_loss), r"does not act on each number by itself"),
    (_variant("ByIdentity", _by_identity), r"does not act on each number by itself"),
    (_variant("Replaces", _replaces), r"does not act on each number by itself"),
    (_variant("Statistics", _statistics), r"computes state 'norm' from more"),
    (_variant("OfAll", _of_all), r"computes the state 'largest' of all parameters from more"),
    (_variant("Fails", _fails), r"cannot be stepped with plain tensors: KeyError: 'of its own'"),
    (_variant("Still", _still), r"changes no parameter in 32 steps"),
    (_variant("Infinite", _infinite), r"not finite"),
    (_Twice, r"calls the closure of a step 2 times"),
    (_Inner, r"_Inner does not act on each number by itself"),
    (functools.partial(Own, kind="norm"), None),
    (torch.optim.Adafactor, r"torch\.optim\.Adafactor does not .* on no norm of a tensor"),
    (torch.optim.LBFGS, "LBFGS"),
    (torch.optim.SparseAdam, r"SparseAdam cannot be stepped with plain tensors: .*dense"),
]


@pytest.mark.parametrize(("cls", "words"), REFUSED, ids=[getattr(each, "__name__", "partial") for each, _ in REFUSED])
def test_steps_that_couple_numbers_are_refused(cls, words):
    weights = list(nn.Linear(5, 7).parameters())
    if words is None:
        with pytest.raises(
            TypeError, match=r"on_shards: expected a subclass of torch\.optim\.Optimizer, got functools"
        ):
            on_shards(cls, weights)
        return
    with pytest.raises(ValueError, match=words):
        on_shards(cls, weights)


def _by_option(self, p, state, group, loss):
    state["mean"] = torch.zeros(p.shape if group["kind"] == "plain" else (1,), dtype=p.dtype)
    _plain(p, group, p.grad)


def test_state_is_laid_out_alike_in_all_groups():
    weight, bias = nn.Linear(5, 7).parameters()
    cls = _variant("ByOption", _by_option)
    for kind in ("plain", "number"):
        on_shards(cls, [weight, bias], kind=kind)
    with pytest.raises(ValueError, match="keeps state 'mean' of the parameter's shape and of one number"):
        on_shards(cls, [{"params": [weight]}, {"params": [bias], "kind": "number"}])


def test_a_test_draws_no_random_numbers_and_runs_no_hooks():
    weights = list(nn.Linear(5, 7).parameters())
    calls = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        states = torch.get_rng_state(), python_random.getstate()
        on_shards(Own, weights)
        with pytest.raises(ValueError, match="draws random"):
            on_shards(_variant("Noise", _noise), weights)
        assert torch.equal(states[0], torch.get_rng_state()) and states[1] == python_random.getstate()
    finally:
        handle.remove()
    assert not calls


def test_options_are_tested():
    weight, bias = nn.Linear(5, 7).parameters()
    assert isinstance(on_shards(Own, [weight], kind="plain"), Own)
    for given, options in (
        ([weight], {"kind": "norm"}),
        ([{"params": [bias]}, {"params": weight, "kind": "norm"}], {}),
    ):
        with pytest.raises(ValueError, match="Own does not act on each number by itself"):
            on_shards(Own, given, **options)
    with pytest.raises(ValueError, match=r"cannot be built here: TypeError: .*unexpected keyword argument 'nothing'"):
        on_shards(Own, [weight], nothing=1)
    with pytest.raises(ValueError, match=r"expected parameters without names, got a tuple"):
        on_shards(Own, [("weight", weight)])
    with pytest.raises(ValueError, match="changes no parameter"):
        on_shards(Own, [weight], lr=0.0)
    for dtype in (torch.bfloat16, torch.float16, torch.complex64):
        on_shards(Own, [nn.Parameter(torch.ones(3, dtype=dtype))])


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
def test_torchs_elementwise_optimizers_pass(name):
    on_shards(getattr(torch.optim, name), [nn.Parameter(torch.ones(3))])


# -- on ranks ----------------------------------------------------------------------------------------------------------


class Averaged(Own):
    """Trains one set of weights, and exchanges it with an average."""

    def update(self, p, state, group, loss):
        if not state:
            state["average"] = p.detach().clone()
        p.sub_(p.grad, alpha=group["lr"])
        state["average"].mul_(0.5).add_(torch.full(p.shape, 0.5, dtype=p.dtype) * p)

    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                other = p.data + torch.zeros(p.shape, dtype=p.dtype)  # a plain tensor, as in steps
                p.data.copy_(self.state[p]["average"])
                self.state[p]["average"].copy_(other)

    train = eval


class AllInState(Own):
    """Keeps a number that belongs to no parameter, and one of each as a tensor of one dimension."""

    def update(self, p, state, group, loss):
        self.state["steps"] = self.state.get("steps", 0) + 1
        state["step"] = state.get("step", torch.zeros(1)) + 1
        state.setdefault("squares", torch.zeros(p.shape, dtype=p.dtype)).addcmul_(p.grad, p.grad)
        p.sub_(p.grad / (state["squares"].sqrt() + 0.1 * float(state["step"])), alpha=group["lr"])


def _maker(cls, **options):
    return lambda model: [on_shards(cls, model.parameters(), **options)]


def _trains(rank, ranks, cases_of):
    cases = Cases()
    for shape, outer in cases_of:
        for cls in (Own, AllInState) if shape == (3,) else (Own,):
            assert_trains(cases, cls.__name__, _maker(cls), rank, shape, outer)
        with cases.case(f"averages, {shape} {outer}"):
            plain, model = Mixed(), convert(Mixed(), shape, outer() if outer else None)
            (reference,), (optimizer,) = _maker(Averaged)(plain), _maker(Averaged)(model)
            train(plain, [reference], range(ranks), 3)
            train(model, [optimizer], [rank], 3)
            trained = wholes(model.parameters())
            for mode in ("eval", "train"):
                versions = [p._version for p in model.parameters()]
                getattr(reference, mode)()
                getattr(optimizer, mode)()
                assert all(p._version > known for p, known in zip(model.parameters(), versions, strict=True))
                assert_alike(model, plain)
                assert differs(trained[0], wholes(model.parameters())[0], 1e-4) == (mode == "eval")
                # the forward computes with what has been written
                loss = sum(batch_loss(plain, each, 9) for each in range(ranks))
                found = batch_loss(model, rank, 9).detach().clone()
                torch.distributed.all_reduce(found)
                assert_same(found, loss.detach(), 1e-12, mode, scale=1.0)
            train(plain, [reference], range(ranks), 2, first=3)
            train(model, [optimizer], [rank], 2, first=3)
            assert_alike(model, plain)
    model = convert(Mixed(), (ranks,))
    with (
        cases.case("control: without on_shards"),
        pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"),
    ):
        train(model, [Own(model.parameters())], [rank])
    cases.finish()


@pytest.mark.parametrize("cases_of", [[((1,), None)], [((3,), None)], [(GRID, ZeroOuter)]], ids=str)
def test_they_train_as_in_one_process(cases_of):
    run_ranks(_trains, torch.Size(cases_of[0][0]).numel(), cases_of)


def _groups(model, stray):
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": weights, "lr": 0.02}, {"params": [*others, stray], "momentum": 0.5}]


def _looped(model, batches, make):
    """A plain parameter among shards, schedules, clipping, hooks, closures, and a group that is added later."""
    stray, late = (nn.Parameter(torch.full((3, 3), 0.5, dtype=torch.float64)) for _ in "12")
    optimizer = make(_groups(model, stray))
    assert type(optimizer) is Own and isinstance(optimizer, Optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)  # begins with a rate of 0
    seen = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    norms = []
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": [late], "momentum": 0.1})
            schedule.base_lrs.append(0.05)
            schedule.lr_lambdas.append(lambda step: step / 4)

        def closure(step=step):
            optimizer.zero_grad()
            loss = sum(batch_loss(model, batch, step) for batch in batches) / len(batches)
            (loss + (stray**2).sum() + (late**3).sum()).backward()
            norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.2)).item())
            return loss

        if step % 2:
            closure()
            optimizer.step()
        else:
            assert optimizer.step(closure) is not None
        schedule.step()
    assert seen == [optimizer] * 6 and min(norms) > 0.2, norms
    return [stray, late], norms, optimizer


@on_ranks(2)
def test_loops_groups_and_other_uses(rank, ranks, cases):
    with cases.case("groups, schedules, clipping, closures"):
        plain, model = Mixed(), convert(Mixed(), (ranks,))
        expected, known, reference = _looped(plain, range(ranks), Own)
        found, norms, optimizer = _looped(model, [rank], functools.partial(on_shards, Own))
        assert_alike(model, plain)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs, 1e-12, "a plain parameter", scale=0.5)
        assert norms == pytest.approx(known, rel=1e-12)
        assert differs(expected[0], torch.full((3, 3), 0.5), 1e-2), "control: it trains"
        own, others = (
            [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in (optimizer, reference)
        )
        assert own == others
    with cases.case("a step with other options is tested first"):
        optimizer.param_groups[0]["lr"] = 0.3
        optimizer.step()
        before = wholes(model.parameters())
        optimizer.param_groups[1]["kind"] = "norm"
        with pytest.raises(ValueError, match=r"on_shards: test_on_shards\.Own does not act"):
            optimizer.step()
        assert all(map(torch.equal, before, wholes(model.parameters())))
        optimizer.param_groups[1]["kind"] = "plain"
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "kind": "norm"})
        with pytest.raises(ValueError, match=r"on_shards: test_on_shards\.Own does not act"):
            optimizer.step()
    with cases.case("more arguments of a step"), pytest.raises(ValueError, match="a step of Own with a closure alone"):
        on_shards(Own, model.parameters()).step(None, 1)
    with cases.case("tables with sparse gradients stay whole"):
        plain, model = (
            nn.Embedding(7, 5, sparse=True).double(),
            nn.Sequential(nn.Linear(5, 5), nn.Embedding(7, 5, sparse=True)).double(),
        )
        with torch.no_grad():
            plain.weight.copy_(random(7, 5, dtype=torch.float64, seed=9))
            model[1].weight.copy_(plain.weight)
        rtp_ext.fully_rotate(model, mesh=mesh_of((ranks,)), timeout=30.0)
        reference, optimizer = Own(plain.parameters()), on_shards(Own, model[1].parameters())
        for step in range(3):
            for each, optim, batches in ((plain, reference, range(ranks)), (model[1], optimizer, [rank])):
                optim.zero_grad()
                (sum((each(torch.tensor([b, step])) ** 2).sum() for b in batches) / len(batches)).backward()
                assert isinstance(each.weight.grad, DTensor) or each.weight.grad.is_sparse
                optim.step()
        assert_same(full(model[1].weight), plain.weight, 1e-12, "table", scale=1.0)
    with cases.case("other DTensors"):
        other = nn.Parameter(
            distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (ranks, 1)), [Shard(0), Shard(0)])
        )
        with pytest.raises(
            ValueError, match=r"after fully_rotate, or plain ones, got another DTensor of shape \(4, 4\)"
        ):
            on_shards(Own, [other])


@on_ranks(4)
def test_replicas_that_train_apart(rank, ranks):
    workers = [Mixed() for _ in range(2)]
    for number, worker in enumerate(workers):
        train(worker, [Own(worker.parameters())], range(2 * number, 2 * number + 2), 3)
    model = convert(Mixed(), GRID, LocalSGD(period=4))
    (optimizer,) = _maker(Own)(model)
    outer_of(model).attach(optimizer)
    train(model, [optimizer], [rank], 3)
    assert_alike(model, workers[rank // 2])
    train(model, [optimizer], [rank], 1, first=3)
    first = full(next(model.parameters()).detach())
    others = [torch.empty_like(first) for _ in range(ranks)]
    torch.distributed.all_gather(others, first)
    assert all(torch.equal(first, each) for each in others), "the replicas meet after four steps"


def _share(rank, ranks):
    return range(rank * 6 // ranks, (rank + 1) * 6 // ranks)


def _saves(rank, ranks, folder, cls):
    plain, model = Mixed(), convert(Mixed(), (ranks,))
    (reference,), (optimizer,) = [cls(plain.parameters())], _maker(cls)(model)
    train(plain, [reference], range(6), 2)
    train(model, [optimizer], _share(rank, ranks), 2)
    own, stock = optimizer.state_dict(), reference.state_dict()
    assert own.keys() == stock.keys() and own["state"].keys() == stock["state"].keys()
    assert own["param_groups"] == stock["param_groups"]
    for p, state in optimizer.state.items():
        if not isinstance(p, torch.Tensor):
            continue
        for key, value in state.items():
            assert isinstance(value, DTensor) == (key != "step"), key
            assert key == "step" or value.placements == p.placements
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    whole = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    # torch's own, on the same rank
    twin = convert(Mixed(), (ranks,))
    with torch.no_grad():
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    (other,) = _maker(cls)(twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(plain, [reference], range(6), 2, first=2)
    train(twin, [other], _share(rank, ranks), 2, first=2)
    assert_alike(twin, plain)
    return whole


def _resumes(rank, ranks, folder, cls, whole):
    plain = Mixed()
    train(plain, [cls(plain.parameters())], range(6), 4)
    for way in ("checkpoint", "whole"):
        model = Mixed()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        convert(model, (ranks,))
        (optimizer,) = _maker(cls)(model)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        if way == "whole":
            set_model_state_dict(model, weights)
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(whole), options=WHOLE)
        else:
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        train(model, [optimizer], _share(rank, ranks), 2, first=2)
        assert_alike(model, plain)
        train(model, [optimizer], _share(rank, ranks), 1, first=4)
        with pytest.raises(AssertionError):  # control
            assert_alike(model, plain, 1e-6)


def test_checkpoints_move_to_another_number_of_ranks(tmp_path):
    whole = run_ranks(_saves, 2, str(tmp_path), Own)[0]
    run_ranks(_resumes, 3, str(tmp_path), Own, whole)
