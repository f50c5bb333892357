"""State of tensor-parallel models under rotation: whole, saved on one mesh and loaded on another, initialised, copied;
the example."""

import copy
import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import on_ranks
from reference import assert_same, differs, full, local, whole_parameters
from tensor_models import (
    EXACT,
    Tiny,
    adamw,
    batch_loss,
    batch_number,
    parallel,
    rotated,
    sequence_parallel,
    step_on,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import rtp_ext
from rtp_ext import RotationDims

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tensor.py"
WHOLE = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def scaled(factor, dtype=torch.float64):
    model = Tiny(dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def on_both(names=("ring", "tp"), embedding=RowwiseParallel, model=None, **options):
    model = scaled(-0.5) if model is None else model
    return rotated((2, 2), names, sequence_parallel(embedding), model=model, **options)


def on_a_ring():
    model = rtp_ext.fully_rotate(scaled(-0.5), timeout=30.0)
    return model, init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))


def assert_same_weights(model, plain, what):
    for (name, parameter), other in zip(whole_parameters(model).items(), plain.parameters(), strict=True):
        assert_same(parameter, other, EXACT, f"{what}: {name}")


def all_losses(plain, batches, step):
    return sum(batch_loss(plain, batch, step) for batch in range(batches)) / batches


def whole_state(cases, rank):
    for names, embedding in ((("ring", "tp"), RowwiseParallel), (("tp", "ring"), ColwiseParallel)):
        with cases.case(f"whole state dicts, {names}"):
            model, _ = on_both(names, embedding)
            assert differs(full(model.head.weight), Tiny().head.weight, EXACT), "control"
            set_model_state_dict(model, Tiny().state_dict(), options=WHOLE)
            assert_same_weights(model, Tiny(), "set")
            whole = get_model_state_dict(model, options=WHOLE)
            for name, value in Tiny().state_dict().items():
                assert_same(full(whole[name]), value, 0.0, name)
            set_model_state_dict(model, scaled(3.0).state_dict() if rank == 0 else {}, options=FROM_FIRST)
            assert_same_weights(model, scaled(3.0), "from the first rank")
            model.load_state_dict(scaled(2.0).state_dict(), assign=True)
            assert_same_weights(model, scaled(2.0), "assigned")
            assert {p.device_mesh for p in model.parameters()} == {model.head.weight.device_mesh}


def checkpoints(cases, folder):
    for name, make, other in (("both", on_both, on_a_ring), ("ring", on_a_ring, on_both)):
        with cases.case(f"checkpoint of {name}"):
            model, mesh = make()
            set_model_state_dict(model, Tiny().state_dict(), options=WHOLE)
            batch, batches = batch_number(mesh)
            plain = Tiny()
            reference, optimizer = adamw(plain), adamw(model)
            step_on(plain, reference, all_losses(plain, batches, 0), False)
            step_on(model, optimizer, batch_loss(model, batch, 0), False)
            saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(saved, checkpoint_id=f"{folder}/{name}")
            loaded, mesh = other()
            batch, batches = batch_number(mesh)
            its_optimizer = adamw(loaded)
            state = dict(zip(("model", "optimizer"), get_state_dict(loaded, its_optimizer), strict=True))
            assert differs(full(loaded.head.weight), plain.head.weight, EXACT), "control"
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
            set_state_dict(loaded, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            assert_same_weights(loaded, plain, "loaded")
            step_on(plain, reference, all_losses(plain, batches, 1), False)
            step_on(loaded, its_optimizer, batch_loss(loaded, batch, 1), False)
            assert_same_weights(loaded, plain, "a step later")


def initial(cases):
    with cases.case("initialised from the meta device"):
        with torch.device("meta"):
            empty = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 9), nn.Linear(9, 5), nn.LayerNorm(5)).double()
        plan = {"0": RowwiseParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
        model, mesh = parallel((2, 2), ("ring", "tp"), plan, model=empty)
        rtp_ext.fully_rotate(model, mesh=mesh, dims=RotationDims(), timeout=30.0).to_empty(device="cpu")
        torch.manual_seed(3)
        rtp_ext.init_weights(model, lambda part: hasattr(part, "reset_parameters") and part.reset_parameters())
        torch.manual_seed(3)
        with torch.device("meta"):
            plain = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 9), nn.Linear(9, 5), nn.LayerNorm(5)).double()
        plain.to_empty(device="cpu")
        for part in plain:
            part.reset_parameters()
        assert_same_weights(model, plain, "meta")
        torch.manual_seed(4)
        model[1].reset_parameters()
        torch.manual_seed(4)
        plain[1].reset_parameters()
        assert_same_weights(model, plain, "reset")


def safetensors(cases, rank, folder):
    with cases.case("safetensors"):
        from safetensors.torch import save_file

        if rank == 0:
            save_file(Tiny().state_dict(), f"{folder}/model.safetensors")
        dist.barrier()
        for embedding in (RowwiseParallel, ColwiseParallel):
            model, _ = on_both(embedding=embedding)
            rtp_ext.load_safetensors(model, f"{folder}/model.safetensors")
            assert_same_weights(model, Tiny(), "safetensors")


def copies(cases):
    with cases.case("deepcopy"):
        model, mesh = on_both(model=Tiny())
        twin = copy.deepcopy(model)
        batch, batches = batch_number(mesh)
        plain = Tiny()
        step_on(plain, adamw(plain), all_losses(plain, batches, 0), False)
        step_on(twin, adamw(twin), batch_loss(twin, batch, 0), False)
        assert_same_weights(twin, plain, "copy")
        assert_same_weights(model, Tiny(), "original")
    with cases.case("whole weights outside of their module"):
        for name in ("block.mlp.0", "block.mlp.2", "embed", "norm"):
            weight, expected = model.get_submodule(name).weight, Tiny().get_submodule(name).weight
            factor = torch.arange(expected.numel(), dtype=torch.float64).view(expected.shape) + 1.0
            (weight.full_tensor() * factor * (batch + 1)).sum().backward()
            assert_same(full(weight.grad), factor * (batches + 1) / 2, EXACT, name)
    with cases.case("one mesh, in one order"):
        meshes = {parameter.device_mesh for parameter in model.parameters()}
        assert [mesh.mesh_dim_names for mesh in meshes] == [("tp", "ring")]
        assert local(model.block.mlp[0].weight).shape[0] < 5 and model.block.mlp[0].weight.shape == (9, 7)


def example_in_one_process():
    """The same, in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(32, 64), nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generators = [torch.Generator().manual_seed(1 + position) for position in range(2)]
    losses = []
    for _ in range(12):
        batches = [torch.randint(32, (8, 16), generator=generator) for generator in generators]
        loss = sum(
            nn.functional.cross_entropy(model(ids).flatten(0, 1), (3 * ids + 1).flatten() % 32) / 2 for ids in batches
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def example(cases, rank):
    with cases.case("the example"):
        spec = importlib.util.spec_from_file_location("tensor_example", EXAMPLE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        losses, expected = module.main(["--tensor", "2", "--steps", "12"]), example_in_one_process()
        assert losses[-1] < 0.5 * losses[0], losses
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-4 * losses[0], (losses, expected)


@on_ranks(4)
def test_state(rank, cases, tmp_path):
    folder = str(tmp_path)
    whole_state(cases, rank)
    checkpoints(cases, folder)
    initial(cases)
    safetensors(cases, rank, folder)
    copies(cases)
    example(cases, rank)
