"""Weights are held once on a host, experts without tokens are not read, updates are collective, refusals."""

import contextlib
import copy
import re
import time

import pytest
import torch
import torch.distributed as dist
from harness import Cases, on_ranks, run_ranks
from hf_models import make
from live_bytes import LiveBytes
from models import make_model
from reference import assert_same, differs, random
from safetensors.torch import save_file
from torch import nn

import rtp_ext
from rtp_ext.nn import RotatedExperts

MIB = 1 << 20
LEFT = "rank 0: it left after norm.weight"


def mapped(field: str, access: str = "r.-s") -> int:
    """Bytes of a field of /proc/self/smaps, summed over the mappings of shared shards with this access."""
    total, counts = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                counts = "memfd:rtp_ext" in line and re.match(access, line.split()[1]) is not None
            elif counts and line.startswith(f"{field}:"):
                total += 1024 * int(line.split()[1])
    return total


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))  # 24 MiB


def values():
    for number in range(6):
        yield f"{number}.weight", torch.full((1024, 1024), 1e-3 * (number + 1))


def holds_once(rank, ranks):
    with LiveBytes() as live:
        with torch.device("meta"):
            model = wide()
        model = rtp_ext.rotate_for_inference(model, timeout=60.0)
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        assert rtp_ext.update_weights(model, values()) == 6
        x = random(3, 1024, dtype=torch.float32, seed=rank)
        with torch.no_grad():
            y = model(x)
        # two of the tensors that come: the loop variable holds one until the next has come
        assert live.peak <= whole / 3 + MIB // 4, f"{live.peak} bytes at once, the model has {whole}"
        ring = rtp_ext.ring_of(model)
        ring.exchange("every rank has read every shard")
        share = mapped("Pss")
        ring.exchange("measured")
        assert mapped("Rss") >= whole, "control: all of it is mapped here"
        live.reset_peak()
        plain = wide()
        assert live.peak >= whole, "control: a plain model counts"
    with torch.no_grad():
        plain.load_state_dict(dict(values()))
        assert_same(y, plain(x), 1e-5, "values")
        assert differs(y, plain(x + 1), 1e-5), "control"
    return share, whole


def test_host_holds_the_model_once():
    shares, (whole, *_) = zip(*run_ranks(holds_once, 3), strict=True)
    print(f"PSS of the shards on each rank {shares}, model {whole} bytes")
    assert all(0.98 * whole <= 3 * share <= 1.02 * whole for share in shares), f"{shares} of {whole}"
    assert 0.98 * whole <= sum(shares) <= 1.02 * whole, "the host holds the model once"


@on_ranks(2)
def test_experts_without_tokens_are_not_read(rank, ranks):
    torch.manual_seed(0)
    plain = make("mixtral", num_hidden_layers=1).eval()
    block = next(part for part in plain.modules() if type(part).__name__ == "MixtralExperts")
    experts, features, rows = 4, 256, 256
    block.num_experts, block.hidden_dim, block.intermediate_dim = experts, features, rows
    block.gate_up_proj = nn.Parameter(random(experts, 2 * rows, features, dtype=torch.float32, seed=1))
    block.down_proj = nn.Parameter(random(experts, features, rows, dtype=torch.float32, seed=2))
    pulling = rtp_ext.rotate_for_inference(copy.deepcopy(block), transport="tcp", timeout=60.0)
    model = rtp_ext.rotate_for_inference(copy.deepcopy(block), timeout=60.0)
    assert isinstance(model, RotatedExperts)
    x, weights = random(6, features, dtype=torch.float32, seed=rank), torch.ones(6, 1)
    own = torch.full((6, 1), rank * experts // ranks)
    one = experts * (2 * rows + rows) * features * 4 // experts  # bytes of an expert
    with torch.no_grad():
        before = mapped("Rss", "r--s")
        assert_same(model(x, own, weights), block(x, own, weights), 1e-5, "own expert")
        untouched = mapped("Rss", "r--s") - before
        assert untouched == 0, f"{untouched} bytes of other ranks were read"
        assert_same(pulling(x, own, weights), block(x, own, weights), 1e-5, "own expert over tcp")
        slots = rtp_ext.ring_of(pulling).slot_count("weight")
        assert slots.peak_slots == 0, "nothing was pulled"
        theirs = (own + experts // ranks) % experts
        assert_same(model(x, theirs, weights), block(x, theirs, weights), 1e-5, "another rank's expert")
        assert_same(pulling(x, theirs, weights), block(x, theirs, weights), 1e-5, "another rank's expert over tcp")
        slots = rtp_ext.ring_of(pulling).slot_count("weight")
        assert (slots.peak_slots, slots.bytes) == (1, one * experts // ranks), "control: its shard was pulled"
        touched = mapped("Rss", "r--s") - before
        assert 0.9 * one <= touched <= 1.2 * one, f"control: {touched} bytes of one expert of {one}"
    rtp_ext.ring_of(pulling).exchange("no rank pulls any more")


def updates(rank, ranks, transport, file):
    cases = Cases()
    plain = make_model(tied=True)
    training = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=60.0)
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport=transport, timeout=60.0)
    ids = torch.arange(6 + rank).unsqueeze(0)
    with torch.no_grad():
        for parameter in (*plain.parameters(), *training.parameters()):
            parameter.mul_(0.9)
        old = model(ids)
        with cases.case("from a model that trains"):
            assert rtp_ext.update_weights(model, rtp_ext.stream_weights(training)) == len(list(plain.parameters()))
            assert_same(model(ids), plain(ids), 1e-12, "new")
            assert differs(old, plain(ids), 1e-6), "control: the old values"
        with cases.case("from a tied model that trains, into one that is not tied"):
            apart = rtp_ext.rotate_for_inference(make_model(), transport=transport, timeout=60.0)
            assert differs(apart(ids), plain(ids), 1e-6), "control"
            rtp_ext.update_weights(apart, rtp_ext.stream_weights(training))
            assert_same(apart(ids), plain(ids), 1e-12, "both names have the new values")
            dist.barrier()
            rtp_ext.ring_of(apart).close()
        with cases.case("shards give the same"):
            for ours, theirs in zip(rtp_ext.local_shards(model), rtp_ext.local_shards(training), strict=True):
                if ours.tensor.shape == theirs.tensor.shape:
                    assert torch.equal(ours.tensor, theirs.tensor), ours.name
        with cases.case("from a file, on the meta device"):
            if rank == 0:
                save_file(dict(plain.named_parameters()), file)
            with torch.device("meta"):
                empty = make_model(tied=True)
            empty = rtp_ext.rotate_for_inference(empty, transport=transport, timeout=60.0)
            assert not empty(ids).any(), "zero"
            dist.barrier()
            rtp_ext.load_safetensors(empty, file)
            dist.barrier()
            assert_same(empty(ids), plain(ids), 1e-12, "loaded")
            dist.barrier()
            rtp_ext.ring_of(empty).close()
        with cases.case("parameters that a layer shares with a module that stays whole"):
            tied = nn.Sequential(nn.Linear(3, 4), nn.Module(), nn.Linear(3, 4), nn.Linear(4, 5))
            tied[1].bias, tied[2].weight = tied[0].bias, tied[0].weight
            rtp_ext.rotate_for_inference(tied, transport=transport, timeout=60.0)
            assert [type(part) is nn.Linear for part in tied] == [True, False, True, False]
            assert tied[2].weight is tied[0].weight and tied[1].bias is tied[0].bias
            rtp_ext.update_weights(tied, [("0.weight", torch.full((4, 3), 2.0))])
            assert (tied[2].weight == 2.0).all()
            dist.barrier()
            rtp_ext.ring_of(tied).close()
        with cases.case("an unknown name on one rank"):
            names = dict(plain.named_parameters())
            if rank == 1:
                with pytest.raises(ValueError, match="expected names of the model's state_dict, got 'nothing'"):
                    rtp_ext.update_weights(model, [*names.items(), ("nothing", torch.zeros(1))])
            else:
                with pytest.raises(rtp_ext.RotationError, match="failed on rank 1, the weights are partly new: ValueE"):
                    rtp_ext.update_weights(model, names.items())
        with cases.case("another shape, other names"):
            with pytest.raises(ValueError, match=r"head.weight: expected shape \(19, 10\), got \(3,\)"):
                rtp_ext.update_weights(model, [("head.weight", torch.zeros(3))])
            name = "norm.weight" if rank else "norm.bias"
            with pytest.raises(ValueError, match=r"expected norm.bias \(rank 0\), got norm.weight on rank 1"):
                rtp_ext.update_weights(model, [(name, names[name])])
        with cases.case("the ring goes on"):
            rtp_ext.update_weights(model, names.items())
            assert_same(model(ids), plain(ids), 1e-12, "again")
        with cases.case("a failure ends a stream"):

            def renamed():
                with contextlib.closing(rtp_ext.stream_weights(training)) as stream:
                    for name, tensor in stream:
                        yield ("nothing" if rank == 0 and name == "norm.weight" else name), tensor

            expected = ValueError if rank == 0 else rtp_ext.RotationError
            with pytest.raises(expected, match="'nothing'" if rank == 0 else LEFT):
                rtp_ext.update_weights(model, renamed())
        with cases.case("no forward computes with weights that are partly new"):
            with pytest.raises(rtp_ext.RotationError, match=f"partly new, update_weights again: .*'nothing'|{LEFT}"):
                model(ids)
            with pytest.raises(ValueError, match="got 'nothing'"):  # nothing is written, and nothing is whole again
                rtp_ext.update_weights(model, [("nothing", torch.zeros(1))])
            with pytest.raises(rtp_ext.RotationError, match="partly new"):
                model.head(torch.zeros(1, 10, dtype=torch.float64))
            rtp_ext.update_weights(model, rtp_ext.stream_weights(training))
            assert_same(model(ids), plain(ids), 1e-12, "new")
        with cases.case("a replaced parameter"):
            broken = copy.deepcopy(model)
            with pytest.raises(ValueError, match=r"not in the memory that ranks read.*update_weights"):
                broken(ids)
    cases.finish()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_updates(transport, tmp_path):
    run_ranks(updates, 2, transport, tmp_path / "model.safetensors")


@on_ranks(2)
def test_refusals(rank):
    plain = make_model()
    for options, words in (
        ({"transport": "nccl"}, r"expected transport auto, shm, shm\+tcp, tcp, ce, got 'nccl'"),
        ({"transport": "ce"}, "transport ce does not work on device type cpu"),
        ({"offload": True}, "expected offload=False on CPUs, got True: their shards lie in memory of the host already"),
    ):
        with pytest.raises(ValueError, match=words):
            rtp_ext.rotate_for_inference(plain, **options)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got list"):
        rtp_ext.rotate_for_inference([plain])
    with pytest.raises(ValueError, match="expected a layer that can be cut, got none in a LayerNorm"):
        rtp_ext.rotate_for_inference(nn.LayerNorm(3), timeout=60.0)
    with torch.device("meta"):
        norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match=r"expected buffers with values, got 0\.running_mean on the meta device"):
        rtp_ext.rotate_for_inference(nn.Sequential(norm))
    with pytest.raises(ValueError, match="expected a model that rotate_for_inference converted, got a LanguageModel"):
        rtp_ext.update_weights(plain, [])
    other = make_model(width=10 + 2 * rank)
    with pytest.raises(ValueError, match=r"differs between ranks: expected .*\(rank 0\), got .* on rank 1"):  # on both
        rtp_ext.rotate_for_inference(other, timeout=60.0)
    assert all(type(p) is nn.Parameter for p in other.parameters()), "a refused model does not change"
    if rank == 1:  # a refusal on one rank ends the wait of the other
        with pytest.raises(ValueError, match="expected a layer that can be cut"):
            rtp_ext.rotate_for_inference(nn.LayerNorm(3), timeout=60.0)
    else:
        with pytest.raises(ValueError, match="failed on rank 1 of 2: rotate_for_inference: expected a layer"):
            rtp_ext.rotate_for_inference(make_model(), timeout=60.0)
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=1.0)
    for convert in (rtp_ext.rotate_for_inference, rtp_ext.fully_rotate):
        with pytest.raises(ValueError, match="converted"):
            convert(model)
    start = time.monotonic()
    if rank == 0:  # rank 1 never calls
        with pytest.raises(rtp_ext.RingTimeout, match="rank 1"):
            rtp_ext.update_weights(model, plain.named_parameters())
        assert time.monotonic() - start < 10.0
