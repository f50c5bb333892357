"""Three steps of adapters around frozen weights in blocks, on rings whose other weights travel in 8 bits, and by Muon:
the plain model in one process, with the values of the blocks, gives the same losses, gradients and parameters."""

import copy

import peft
import torch
from harness import on_ranks
from matrix_optimizers import Muon as StockMuon
from reference import assert_same, differs, full
from rounded_travel import computing_with, cuts_of
from test_frozen_adapters import _loss, _model, _with_values
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import rtp_ext
from rtp_ext.optim import Muon, matrices

TOLERANCE, STEPS = 2e-5, 3  # of the largest gradient; a sum in another order may round to another one of 255 values
AHEAD = {"travel": "int8", "transport": "tcp"}
OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
ROUNDED = [("nf4", AHEAD, {}), ("int8", {"travel": "int8", "transport": "shm"}, OFFLOADED)]


def _losses(model, step, ranks):
    return [_loss(model, rank, step) for rank in range(ranks)]


def _train(cases, what, converted, plain, optimizers, rank, ranks, travel=None):
    """`optimizers`: of both models. `travel`: the format of the weights that are not in blocks."""
    start = copy.deepcopy(plain)
    sharded = [(name, p) for name, p in converted.named_parameters() if isinstance(p, DTensor)]
    cuts = {name: cuts_of(p) for name, p in sharded if p.is_floating_point() and p.dim() > 1}
    for step in range(STEPS):
        loss = _loss(converted, rank, step)
        loss.backward()
        with computing_with(plain, cuts, travel):
            expected = _losses(plain, step, ranks)
            (sum(expected) / ranks).backward()
        with cases.case(f"{what} step {step}"):
            assert abs(loss.item() - expected[rank].item()) <= TOLERANCE * loss.item()
            trained = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
            largest = max(gradient.abs().max().item() for gradient in trained.values())
            for name, gradient in trained.items():
                assert_same(full(converted.get_parameter(name).grad), gradient, TOLERANCE, name, largest)
        if travel is not None and step == 0:
            (sum(_losses(start, step, ranks)) / ranks).backward()
            with cases.case(f"{what}: control: weights that are not rounded"):
                exact = {name: start.get_parameter(name).grad for name in trained}
                wrong = [(exact[name] - gradient).abs().max().item() for name, gradient in trained.items()]
                assert max(wrong) > 10 * TOLERANCE * largest, (max(wrong), largest)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return start


@on_ranks(3)
def test_other_weights_travel_in_8_bits(rank, ranks, cases):
    for format, options, offload in ROUNDED:
        with rtp_ext.Ring(timeout=60.0, **options) as ring:
            model = rtp_ext.fully_rotate(_model(["q_proj", "down_proj"]), mesh=ring, frozen=format, **offload)
            plain = _with_values(_model(["q_proj", "down_proj"]), rtp_ext.frozen_weights(model))
            optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.05) for m in (model, plain)]
            _train(cases, f"{format} {options}", model, plain, optimizers, rank, ranks, "int8")
            if options is AHEAD:
                assert ring.prefetched()[1] > 0


@on_ranks(3)
def test_muon_on_adapters(rank, ranks, cases):
    """Adapters from before the conversion, whose matrices are cut, and from after it, which are whole."""
    for later in (False, True):
        with rtp_ext.Ring(timeout=60.0, transport="shm") as ring:
            plain = _model()
            model = copy.deepcopy(plain)
            if later:
                model = rtp_ext.fully_rotate(model.unload().requires_grad_(False), mesh=ring, frozen="int8")
                adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
                adapted = [(name, p) for name, p in plain.named_parameters() if "lora_" in name]
                model = _with_values(peft.get_peft_model(model, adapters), dict(adapted))
            else:
                model = rtp_ext.fully_rotate(model, mesh=ring, frozen="int8")
            _with_values(plain, rtp_ext.frozen_weights(model))
            trained = [[p for p in matrices(each)[0] if p.requires_grad] for each in (model, plain)]
            with cases.case(f"later {later}"):
                assert len(trained[0]) == len(trained[1]) == 28
            optimizers = [kind(some, lr=0.02) for kind, some in zip((Muon, StockMuon), trained, strict=True)]
            start = _train(cases, f"later {later}", model, plain, optimizers, rank, ranks)
            for name, parameter in plain.named_parameters():
                if parameter.requires_grad:
                    with cases.case(f"later {later} {name}"):
                        assert_same(full(model.get_parameter(name)), parameter, TOLERANCE, name)
                        assert differs(start.get_parameter(name), parameter, 100 * TOLERANCE), "control"
