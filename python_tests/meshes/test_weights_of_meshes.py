"""stream_weights and local_shards where more than a ring cuts the model: tensor parallelism, stages of a pipeline,
frozen weights in blocks."""

import copy

import pytest
import torch
from harness import Cases, run_ranks
from models import make_model
from pipeline_models import Part
from tensor_models import Tiny, replicated_activations, rotated
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import rtp_ext


def covered(every_rank: list[list], plain: dict[str, torch.Tensor]) -> None:
    """The parts of all ranks give the whole tensors; each element of a cut one comes from one rank."""
    for name, whole in plain.items():
        found, count = torch.full_like(whole, float("nan")), torch.zeros(whole.shape)
        for shards in every_rank:
            ((tensor, shape, offsets),) = [rest for other, *rest in shards if other == name]
            assert shape == whole.shape, name
            place = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
            found[place] = tensor
            count[place] += 1
        assert torch.equal(found, whole), name
        assert len(count.unique()) == 1, f"{name}: elements come from {count.unique()} ranks"


def expect_stream(model, plain: dict[str, torch.Tensor], **options) -> None:
    found = dict(rtp_ext.stream_weights(model, **options))
    seen: set[int] = set()
    names = [name for name, value in plain.items() if value.data_ptr() not in seen and not seen.add(value.data_ptr())]
    assert list(found) == names
    for name, value in found.items():
        assert torch.equal(value, plain[name]), name


def of_tensor_parallelism(rank, ranks, tied):
    plan = replicated_activations(RowwiseParallel if tied else ColwiseParallel)  # a shared table: by the vocabulary
    model, _ = rotated((2, 2), ("ring", "tp"), plan, tied)
    expect_stream(model, Tiny(tied).state_dict(), bucket_bytes=100)
    shards = [(n, t.clone(), s, o) for n, t, s, o in rtp_ext.local_shards(model)]
    cut = [name for name, tensor, whole, _ in shards if tensor.numel() <= (whole.numel() + 8) // 3]
    assert cut, "control: tensors that both dimensions cut"
    return shards


@pytest.mark.parametrize("tied", [False, True])
def test_tensor_parallelism(tied):
    covered(run_ranks(of_tensor_parallelism, 4, tied), Tiny(tied).state_dict())


def stage(index: int) -> Part:
    torch.manual_seed(index)
    return Part(index, 2)


def of_a_pipeline(rank, ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "ring"))
    index = mesh.get_local_rank("stage")
    plain = stage(index)
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh["ring"], timeout=60.0)
    if index == 0:  # the other stage streams nothing meanwhile
        expect_stream(model, plain.state_dict())
    found = dict(rtp_ext.stream_weights(model, ranks=[1]))
    assert set(found) == (set(plain.state_dict()) if rank == 1 else set()), "rank 1 is of stage 0"
    return index, [(n, t.clone(), s, o) for n, t, s, o in rtp_ext.local_shards(model)]


def test_stages_of_a_pipeline():
    results = run_ranks(of_a_pipeline, 4)
    for index in range(2):
        covered([shards for which, shards in results if which == index], stage(index).state_dict())


def of_blocks(rank, ranks):
    cases, plain = Cases(), make_model().float()
    for parameter in plain.parameters():
        parameter.requires_grad_(False)
    shards, wholes = {}, {}
    for format in ("nf4", "mxfp4", "int8"):
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), frozen=format, timeout=60.0)
        values = plain.state_dict() | rtp_ext.frozen_weights(model)
        with cases.case(format):
            expect_stream(model, values)
            assert any(not torch.equal(value, values[name]) for name, value in plain.state_dict().items()), "control"
        shards[format] = [(n, t.clone(), s, o) for n, t, s, o in rtp_ext.local_shards(model)]
        wholes[format] = values
        rtp_ext.ring_of(model).close()
    cases.finish()
    return shards, wholes


def test_weights_in_blocks():
    results = run_ranks(of_blocks, 3)
    for format, whole in results[0][1].items():
        covered([shards[format] for shards, _ in results], whole)
