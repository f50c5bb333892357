"""Adapters of the peft package on a Llama whose base is in blocks, against one process that computes with the same
values, and the options that such a model may be combined with."""

import copy

import peft
import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks
from pretended_hosts import pretend_hosts
from reference import adamw, assert_same, differs, full
from test_checksum import Rings, told_of_a_flip, unnoticed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

import rtp_ext

TOLERANCE = 1e-6  # float32, of the largest gradient
STEPS = 2


def _model(targets: str | list[str] = "all-linear", dora: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        use_cache=False,
    )
    model = peft.get_peft_model(
        LlamaForCausalLM(config),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", use_dora=dora),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, which would hide the base
            nn.init.normal_(parameter, std=0.1)
    return model


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(7 * rank + step))
    return model(input_ids=ids, labels=ids).loss


def _with_values(model: nn.Module, values: dict[str, torch.Tensor]) -> nn.Module:
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)
    return model


def _compare(cases, what, converted, plain, rank, ranks, tolerance):
    """Losses and gradients of adapters of two steps."""
    values = rtp_ext.frozen_weights(converted)
    assert len(values) >= 7, values.keys()
    rounded, unrounded = _with_values(copy.deepcopy(plain), values), copy.deepcopy(plain)
    optimizers = [adamw([p for p in each.parameters() if p.requires_grad], lr=0.01) for each in (converted, rounded)]
    for step in range(STEPS):
        loss = _loss(converted, rank, step)
        loss.backward()
        expected = [_loss(rounded, each, step) for each in range(ranks)]
        (sum(expected) / ranks).backward()
        _loss(unrounded, rank, step).backward()
        with cases.case(f"{what} step {step}"):
            assert abs(loss.item() - expected[rank].item()) <= 10 * tolerance * abs(loss.item())
            gradients = {name: p.grad for name, p in rounded.named_parameters() if p.requires_grad}
            largest = max(g.abs().max().item() for g in gradients.values())
            wrong, bound = 0, tolerance if step == 0 else 10 * tolerance  # AdamW divides small gradients by themselves
            for name, gradient in gradients.items():
                mine = full(converted.get_parameter(name).grad)
                assert_same(mine, gradient, bound, name, largest)
                wrong += differs(unrounded.get_parameter(name).grad, gradient, 100 * tolerance)
            assert wrong > len(gradients) / 2, "control: a base that is not rounded"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(few([2], [2, 3]))
def test_adapters(rank, ranks, cases):
    for format, targets, options in (
        ("nf4", "all-linear", {"transport": "shm"}),
        ("mxfp4", ["down_proj"], {"transport": "tcp"}),  # q, k and v travel together
        ("int8", ["q_proj", "o_proj"], {"transport": "c10d", "travel": "bfloat16"}),
    ):
        plain, model, twin = (_model(targets) for _ in range(3))
        if targets == ["down_proj"]:  # a trained weight in one rotation with frozen ones
            for each in (plain, model, twin):
                each.base_model.model.model.layers[1].self_attn.q_proj.weight.requires_grad_(True)
        rtp_ext.fully_rotate(model, frozen=format, **options)
        ring = rtp_ext.ring_of(model)
        if "travel" in options:  # adapters travel in 16 bits, which the reference does not round
            _loss(model, rank, 0).backward()
        else:
            _compare(cases, f"{format} {options}", model, plain, rank, ranks, TOLERANCE)
        with cases.case(f"{format}: plan and traffic"):
            plan = rtp_ext.explain(model)
            names = {row.name for row in plan.parameters if row.travel == format}
            assert names == set(rtp_ext.frozen_weights(model))
            assert next(row.wide for row in plan.parameters if "lm_head" in row.name).startswith("it is the vocabulary")
            before = rtp_ext.explain(twin, frozen=format, mesh=ring)
            assert before == plan
            assert "mlp" not in {bundle.kind for bundle in plan.bundles}
            shared = [bundle for bundle in plan.bundles if bundle.kind == "shared input"]
            assert bool(shared) == (targets != "all-linear")
            sent = ring.bytes_sent("weight")
            _loss(model, rank, 0).backward()
            # a first layer whose input requires no gradient sends nothing in backward
            assert 0 < ring.bytes_sent("weight") - sent <= plan.totals["forward_bytes"] + plan.totals["backward_bytes"]
            assert ring.prefetched()[1] > 0
            with pytest.raises(ValueError, match=f"merge: expected a base weight .* blocks of {format}"):
                model.merge_adapter()
        ring.close()
    for options in ({}, {"frozen": "nf4"}):
        refused = pytest.raises(ValueError, match=r"got DoRA around .*q_proj \(Linear\), .*pass use_dora=False")
        with cases.case(f"DoRA {options}"), refused:
            rtp_ext.fully_rotate(_model(dora=True), **options)


def _checkpointed(model: nn.Module) -> nn.Module:
    layers = model.base_model.model.model.layers
    for place, layer in enumerate(layers):
        layers[place] = checkpoint_wrapper(layer)
    return model


@on_ranks(2, timeout=25.0)
def test_combinations(rank, ranks, cases):
    plain = _model()
    model = rtp_ext.fully_rotate(_checkpointed(_model()), frozen="nf4", transport="shm")
    values = {name.replace("_checkpoint_wrapped_module.", ""): w for name, w in rtp_ext.frozen_weights(model).items()}
    rounded = _with_values(_model(), values)
    with cases.case("activation checkpointing"):
        _loss(model, rank, 0).backward()
        (sum(_loss(rounded, each, 0) for each in range(ranks)) / ranks).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                wanted = rounded.get_parameter(name.replace("_checkpoint_wrapped_module.", "")).grad
                assert_same(full(parameter.grad), wanted, 10 * TOLERANCE, name)
    rtp_ext.ring_of(model).close()

    model = rtp_ext.fully_rotate(_model(), frozen="nf4", transport="tcp")
    rounded = _with_values(_model(), rtp_ext.frozen_weights(model))
    with torch.autocast("cpu", torch.bfloat16):
        mine, wanted, wide = (_loss(each, rank, 0) for each in (model, rounded, plain))
    mine.backward()
    with cases.case("autocast"):
        off, control = abs(mine.item() - wanted.item()), abs(wide.item() - wanted.item())
        assert off < 2e-3 and control > 1.5 * off, (off, control)
    with cases.case("evaluation after autocast"), torch.no_grad():
        assert abs(_loss(model, rank, 0).item() - _loss(rounded, rank, 0).item()) < 1e-5
    with cases.case("a copy"):
        assert torch.equal(_loss(copy.deepcopy(model), rank, 1), _loss(model, rank, 1))
    small = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    small[0].weight.requires_grad_(False)
    rtp_ext.fully_rotate(small, frozen="nf4", mesh=rtp_ext.ring_of(model))
    with cases.case("torch.compile"):
        x = torch.ones(3, 64)
        assert torch.equal(torch.compile(small, backend="eager")(x), small(x))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(small, backend="eager", fullgraph=True)(x)
    rtp_ext.ring_of(model).close()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = rtp_ext.fully_rotate(_model(), frozen="nf4", mp_policy=policy, transport="shm")
    with cases.case("a policy"):
        assert abs(_loss(model, rank, 0).item() - wanted.item()) < 0.02
    rtp_ext.ring_of(model).close()


def _adapter_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.requires_grad}


@on_ranks(2, timeout=120.0)
def test_checkpointing_with_everything(rank, ranks, cases):
    """Both kinds of checkpointing, with prefetch, checksums and accumulation, once under autocast, once compiled."""
    for reentrant, narrow in ((False, False), (True, False), (True, True)):
        with rtp_ext.Ring(transport="shm", checksum=True, timeout=60.0) as ring:
            model = rtp_ext.fully_rotate(_model(), frozen="nf4", mesh=ring)
            rounded = _with_values(_model(), rtp_ext.frozen_weights(model)).train()
            model.train().enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            before = ring.bytes_sent("weight")
            if not reentrant:
                model.base_model.model.model.layers[0].mlp.compile(backend="eager")
            for step in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                    _loss(model, rank, step).backward()
                if step == 0:
                    once = ring.bytes_sent("weight") - before
                with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                    sum(_loss(rounded, each, step) / ranks for each in range(ranks)).backward()
            with cases.case(f"reentrant {reentrant}, autocast {narrow}"):
                wanted, found = _adapter_gradients(rounded), _adapter_gradients(model)
                largest = max(each.abs().max().item() for each in wanted.values())
                for name, gradient in wanted.items():
                    assert_same(found[name], gradient, 0.03 if narrow else 10 * TOLERANCE, name, largest)
                plan = rtp_ext.explain(model).totals
                assert once > plan["forward_bytes"] + plan["backward_bytes"], "layers were computed again"
                assert ring.prefetched()[1] > 0
            torch._dynamo.reset()


@on_ranks(2)
def test_a_flipped_bit_of_a_block_is_found(ranks, cases):
    """A bit of a block that flips on the way."""
    x = torch.ones(3, 64)

    def act(ring):
        layer = nn.Linear(64, 96, bias=False).requires_grad_(False)
        nn.init.constant_(layer.weight, 0.5)
        return rtp_ext.fully_rotate(layer, frozen="nf4", mesh=ring)(x)

    rings, expected = Rings("shm"), nn.functional.linear(x, torch.full((96, 64), 0.5))
    with cases.case("found"):
        told_of_a_flip(rings, "weight", ranks, act, r"weight hop 1 of 1: what arrived from rank 0")
    with cases.case("control"):
        found, ring = unnoticed(rings, "weight", ranks, act)
        assert any(ring.exchange(not torch.allclose(found, expected)))
        ring.close()


@on_ranks(4)
def test_replicas_and_two_levels(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ring"))
    dims = rtp_ext.RotationDims(ring="ring", replicate="dp")
    model = rtp_ext.fully_rotate(_model(), mesh=mesh, dims=dims, frozen="nf4", transport="shm")
    _compare(cases, "replicas", model, _model(), rank, ranks, TOLERANCE)
    rtp_ext.ring_of(model).close()
    dist.barrier()
    pretend_hosts(rank, 2)
    model = rtp_ext.fully_rotate(_model(), frozen="nf4", route="two-level")
    with cases.case("two levels"):
        assert rtp_ext.ring_of(model).hop_route == "two-level"
    _compare(cases, "two levels", model, _model(), rank, ranks, TOLERANCE)
    rtp_ext.ring_of(model).close()
