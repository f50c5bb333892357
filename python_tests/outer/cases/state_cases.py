"""State of models on replicas of rings: saved on one mesh and loaded on another, gathered, initialised."""

import copy
import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from reference import assert_same, differs, full, local, random, whole_gradients, wholes
from replica_models import DIMS, EXACT, Tiny, adamw, all_losses, batch_loss, replicated, step_on
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext.outer import AllReduce

WHOLE = StateDictOptions(full_state_dict=True)


def other_values() -> Tiny:
    model = Tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    return model


def on_a_ring() -> nn.Module:
    return rtp_ext.fully_rotate(other_values(), timeout=30.0)


def on_replicas(policy) -> nn.Module:
    return replicated((2, 2), model=other_values(), outer=policy())


def assert_same_weights(model, plain, what):
    for value, (name, other) in zip(wholes(model.parameters()), plain.named_parameters(), strict=True):
        assert_same(value, other, EXACT, f"{what}: {name}")


def state_cases(rank, ranks, cases, folder, policy=AllReduce):
    on_these = partial(on_replicas, policy)
    plain = Tiny()
    reference = adamw(plain)
    step_on(plain, reference, [partial(all_losses, plain, ranks, 0, 1 / ranks)])
    for name, make, other in (("replicas", on_these, on_a_ring), ("ring", on_a_ring, on_these)):
        with cases.case(f"checkpoint of {name}"):
            model = make()
            set_model_state_dict(model, Tiny().state_dict(), options=WHOLE)
            assert_same_weights(model, Tiny(), "from a whole state dict")
            optimizer = adamw(model)
            step_on(model, optimizer, [partial(batch_loss, model, rank, 0)])
            saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(saved, checkpoint_id=f"{folder}/{name}")
            loaded = other()
            its_optimizer = adamw(loaded)
            state = dict(zip(("model", "optimizer"), get_state_dict(loaded, its_optimizer), strict=True))
            assert differs(full(loaded.mix.weight), plain.mix.weight, EXACT), "control"
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
            set_state_dict(loaded, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            assert_same_weights(loaded, plain, "loaded")
            again = copy.deepcopy(plain)
            its = adamw(again)
            its.load_state_dict(copy.deepcopy(reference.state_dict()))
            step_on(again, its, [partial(all_losses, again, ranks, 1, 1 / ranks)])
            step_on(loaded, its_optimizer, [partial(batch_loss, loaded, rank, 1)])
            assert_same_weights(loaded, again, "a step later")
            whole = get_model_state_dict(loaded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if rank == 0:
                last = Tiny()
                last.load_state_dict(whole)
                assert_same_weights(last, again, "a plain model")
    with cases.case("whole tensors, assigned"):
        model = on_these()
        model.load_state_dict(plain.state_dict(), assign=True)
        assert model.head.weight is model.embed.weight
        assert_same_weights(model, plain, "assigned")
        batch_loss(model, rank, 1).backward()
        before, expected = whole_gradients(model), Tiny()
        expected.load_state_dict(plain.state_dict())
        all_losses(expected, ranks, 1, 1 / ranks).backward()
        for name, gradient in whole_gradients(expected).items():
            assert_same(before[name], gradient, EXACT, name)
    with cases.case("initialised from the meta device"):
        with torch.device("meta"):
            empty = Tiny.__new__(Tiny)
            nn.Module.__init__(empty)
            empty.mix, empty.norm = nn.Linear(7, 5, dtype=torch.float64), nn.LayerNorm(5, dtype=torch.float64)
        model = replicated((2, 2), model=empty, outer=policy()).to_empty(device="cpu")
        torch.manual_seed(3)
        rtp_ext.init_weights(model, lambda part: hasattr(part, "reset_parameters") and part.reset_parameters())
        torch.manual_seed(3)
        assert_same(full(model.mix.weight), nn.Linear(7, 5, dtype=torch.float64).weight, 0.0, "weight")
    with cases.case("safetensors"):
        from safetensors.torch import save_file

        if rank == 0:
            own = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
            save_file(own, f"{folder}/model.safetensors")
        dist.barrier()
        model = on_these()
        rtp_ext.load_safetensors(model, f"{folder}/model.safetensors")
        assert_same_weights(model, plain, "safetensors")
    with cases.case("the policy has no state"):
        its_policy = rtp_ext.outer_of(model)
        assert its_policy.state_dict() == {}
        its_policy.load_state_dict({})
    with cases.case("a bias that is gathered and then rotates"):
        plain = nn.MultiheadAttention(6, 2, kdim=5, vdim=4, batch_first=True, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(plain.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))
        model = replicated((2, 2), model=copy.deepcopy(plain), outer=policy())

        def squares(attention, seed):
            x = random(2, 3, 6, dtype=torch.float64, seed=seed)
            return attention(x, x[..., :5], x[..., :4], need_weights=False)[0].square().sum()

        squares(model, rank).backward()
        (sum(squares(plain, each) for each in range(ranks)) / ranks).backward()
        for name, gradient in whole_gradients(plain).items():
            assert_same(whole_gradients(model)[name], gradient, EXACT, name)


def ring_cases(rank, ranks, cases):
    with cases.case("a Ring with replicas"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ring"))
        ring = rtp_ext.Ring(mesh, dims=DIMS, timeout=30.0)
        model = rtp_ext.fully_rotate(Tiny(), mesh=ring)
        assert local(model.mix.weight).shape == ((4, 3)[rank % 2], 7)
        batch_loss(model, rank, 0).backward()
        expected = Tiny()
        all_losses(expected, ranks, 0, 1 / ranks).backward()
        assert_same(full(model.mix.weight.grad), expected.mix.weight.grad, EXACT, "mix.weight")
        linear = rtp_ext.nn.RotatedLinear(7, 5, ring=ring, dtype=torch.float64)
        y = linear(torch.ones(2, 7, dtype=torch.float64))
        with pytest.raises(rtp_ext.RotationError, match="on 2 replicas, but belongs to no outer policy"):
            y.sum().backward()


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "replicas.py"


def example_in_one_process(ranks, steps):
    """The same, on the batches of all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generators = [torch.Generator().manual_seed(1 + rank) for rank in range(ranks)]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for generator in generators * 2:
            x = torch.randn(32, 16, generator=generator)
            loss = nn.functional.mse_loss(model(x), x.unflatten(1, (4, 4)).sum(2)) / (2 * ranks)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def example_cases(rank, ranks, cases):
    """examples/replicas.py: a loss that falls, as it does in one process."""
    spec = importlib.util.spec_from_file_location("replicas_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with cases.case("example"):
        replicas, one_process = example.main(["--ring", "2", "--steps", "8"]), example_in_one_process(ranks, 8)
        assert replicas[-1] < 0.7 * replicas[0], replicas
        assert max(abs(a - b) for a, b in zip(replicas, one_process, strict=True)) < 1e-4 * replicas[0]
