"""local_shards and stream_weights give the plain model's weights, bitwise, and hold one tensor and one bucket."""

import copy

import pytest
import torch
from harness import Cases, on_ranks, run_ranks
from hf_models import make
from live_bytes import LiveBytes
from models import make_model
from reference import chunk
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext.parameters.loading import whole_state

DIMS = (lambda shape: 0, lambda shape: max(len(shape) - 1, 0))  # cut by rows, and by columns
BUCKET = 16384
SLACK = 3 * 4096  # what ranks exchange between buckets; a process group keeps it for a while
PLAIN = {
    "gpt2": lambda: make("gpt2", n_layer=1, n_inner=1500),  # transposed weights, tied
    "mixtral": lambda: make("mixtral", num_hidden_layers=1),  # experts, grouped q, k and v, an MLP bundle
    "small": make_model,  # a scalar, a stray parameter, norms
}


def untied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first of the names of each tensor."""
    seen: set[int] = set()
    return {name: t for name, t in state.items() if t.data_ptr() not in seen and not seen.add(t.data_ptr())}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert list(actual) == list(expected), f"{what}: {list(actual)} for {list(expected)}"
    wrong = [n for n, t in expected.items() if actual[n].dtype != t.dtype or not torch.equal(actual[n], t)]
    assert not wrong, f"{what}: {wrong}"


def check_peak(model, rank):
    most = max(p.numel() * p.element_size() for p in model.parameters())
    with LiveBytes() as live:
        for _ in rtp_ext.stream_weights(model, bucket_bytes=BUCKET):
            del _  # a loop variable would hold the last tensor
        assert live.peak <= most + BUCKET + SLACK, f"{live.peak} bytes, the largest tensor has {most}"
        live.reset_peak()
        for _ in rtp_ext.stream_weights(model, bucket_bytes=BUCKET, ranks=[0]):
            del _
        assert rank == 0 or live.peak <= BUCKET + SLACK, f"{live.peak} bytes on a rank that gets nothing"
        live.reset_peak()
        state = whole_state(model, keep=True)
        assert live.peak > most + BUCKET + SLACK, "control: a whole state dict passes"
        del state


def streamed(rank, ranks):
    """All checks of a stream; returns the local shards of every model, read after its ring was closed."""
    cases, shards = Cases(), {}
    for kind, build in PLAIN.items():
        plain = build()
        expected = untied(plain.state_dict())
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=60.0)
        with cases.case(f"{kind}: values"):
            found = dict(rtp_ext.stream_weights(model))
            assert_equal(found, expected, "stream")
            found[next(iter(found))].add_(1)  # it belongs to the caller
        if kind == "small":
            with cases.case("bfloat16 to rank 1"):
                halves = {n: t.bfloat16() for n, t in expected.items()}
                to_one = dict(rtp_ext.stream_weights(model, dtype=torch.bfloat16, ranks=[1]))
                assert_equal(to_one, halves if rank == 1 else {}, "bfloat16 to rank 1")
        if kind == "gpt2":
            with cases.case("peak"):
                check_peak(model, rank)
        rtp_ext.ring_of(model).close()  # no communication below
        shards[kind] = [tuple(shard) for shard in rtp_ext.local_shards(model)]
        with cases.case(f"{kind}: shards share memory"):
            largest = max(shards[kind], key=lambda shard: shard[1].numel())[1]
            owned = {p.to_local().data_ptr() for p in model.parameters()}
            assert largest.data_ptr() in owned
        shards[kind] = [(name, tensor.clone(), shape, offsets) for name, tensor, shape, offsets in shards[kind]]
    cases.finish()
    return shards


def reshard(shards: list, dim_of, ranks: int) -> tuple[list[dict], dict]:
    """Fills the parts of `ranks` ranks that cut each tensor along `dim_of(shape)`, from overlaps with the shards alone.
    Returns the parts, and how often each element of a whole tensor was written."""
    parts: list[dict] = [{} for _ in range(ranks)]
    written: dict[str, torch.Tensor] = {}
    for of_rank in shards:
        for name, tensor, shape, offsets in of_rank:
            dim = dim_of(shape)
            count = written.setdefault(name, torch.zeros(shape, dtype=torch.int32))
            count[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] += 1
            for rank in range(ranks):
                bounds = chunk(torch.arange(shape[dim]), ranks, rank) if shape else torch.arange(1)
                first, size = (int(bounds[0]) if len(bounds) else 0), len(bounds)
                target_shape = [size if d == dim else n for d, n in enumerate(shape)]
                target = parts[rank].setdefault(name, torch.full(target_shape, float("nan"), dtype=tensor.dtype))
                if not shape:
                    target.copy_(tensor)
                    continue
                low, high = max(first, offsets[dim]), min(first + size, offsets[dim] + tensor.shape[dim])
                if low >= high:
                    continue
                place = [slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True)]
                place[dim] = slice(low - first, high - first)
                target[tuple(place)] = tensor.narrow(dim, low - offsets[dim], high - low)
    return parts, written


def test_streams_and_shards_are_the_plain_model():
    results = run_ranks(streamed, 3)
    for kind, build in PLAIN.items():
        state = build().state_dict()
        for last in (False, True):
            parts, written = reshard([each[kind] for each in results], DIMS[last], 2)
            for rank in range(2):
                for name, whole in state.items():
                    dim = whole.dim() - 1 if last else 0
                    expected = chunk(whole, 2, rank, dim) if whole.dim() else whole
                    assert torch.equal(parts[rank][name], expected), f"{kind}: {name} on rank {rank} of 2"
        assert set(written) == set(state)
        cut = {name for name, _, shape, _ in results[0][kind] if len(shape)}
        assert all(bool((written[name] == 1).all()) for name in cut), f"{kind}: parts overlap, or leave elements out"
    broken = [[(n, t + 1 if t.numel() else t, s, o) for n, t, s, o in each["small"]] for each in results[:1]]
    parts, written = reshard(broken, lambda s: 0, 2)
    assert not torch.equal(parts[0]["head.weight"], chunk(PLAIN["small"]().state_dict()["head.weight"], 2, 0)), (
        "control"
    )
    assert (written["head.weight"] == 0).any(), "control: the shards of one rank do not cover a tensor"


def pieces(rank, ranks):
    """ZeroOuter cuts shards over replicas, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "ring"))
    dims = rtp_ext.RotationDims(replicate="replicate")
    plain = make_model()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh, dims=dims, outer=rtp_ext.outer.ZeroOuter())
    assert_equal(dict(rtp_ext.stream_weights(model)), untied(plain.state_dict()), "pieces")
    return [(n, t.clone(), s, o) for n, t, s, o in rtp_ext.local_shards(model)]


def test_pieces_of_replicas():
    parts, written = reshard(run_ranks(pieces, 4), lambda s: 0, 1)
    for name, whole in make_model().state_dict().items():
        assert torch.equal(parts[0][name], whole), name
    assert (written["head.weight"] == 1).all(), "no element comes from two ranks"


@on_ranks(2)
def test_refusals(rank):
    plain = make_model()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=60.0)
    for call in (rtp_ext.local_shards, rtp_ext.stream_weights):
        with pytest.raises(ValueError, match="expected a model that fully_rotate converted, got a LanguageModel"):
            list(call(plain))
    with pytest.raises(ValueError, match="expected bucket_bytes >= 1, got 0"):
        rtp_ext.stream_weights(model, bucket_bytes=0)
    with pytest.raises(ValueError, match=r"torch.float32.*got \('torch.bfloat16'.*on rank 1"):
        list(rtp_ext.stream_weights(model, dtype=torch.bfloat16 if rank == 1 else torch.float32))
    taken = []
    if rank == 1:  # leaves the loop after two tensors
        stream = rtp_ext.stream_weights(model)
        taken += [next(stream)[0], next(stream)[0]]
        stream.close()
    else:
        with pytest.raises(rtp_ext.RotationError, match="every rank to go on, but rank 1: it left after"):
            taken += [name for name, _ in rtp_ext.stream_weights(model)]
    assert len(dict(rtp_ext.stream_weights(model))) == len(plain.state_dict()), "the ring goes on"
