"""Models for forwards only whose weights are in blocks of 4 or 8 bits: the values that the bytes stand for, their
memory, and new values."""

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks, run_ranks
from hf_models import inputs_of, make, make_batch
from live_bytes import LiveBytes
from reference import assert_same, differs, random
from test_memory_and_updates import MIB, mapped, values, wide
from torch import nn

import rtp_ext
from rtp_ext.parameters.frozen import FORMATS, FrozenWeight

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def standing_for(plain: nn.Module, values: dict[str, torch.Tensor]) -> nn.Module:
    """A copy of the plain model with the values that the blocks stand for."""
    twin = copy.deepcopy(plain)
    missing, unknown = twin.load_state_dict(values, strict=False)
    assert not unknown and len(missing) < len(plain.state_dict())
    return twin


def logits(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(**inputs_of(make_batch("llama", rank, step), torch.float32)).logits


ENOUGH = [(2, "tcp", FORMATS), (3, "shm", FORMATS[:1])]


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "transport", "formats"), few(ENOUGH, [*ENOUGH, *product((1, 2, 3, 4), ("shm", "tcp"), [FORMATS])])
)
@torch.no_grad()
def test_values_bytes_and_updates(rank, ranks, cases, transport, formats):
    plain = make("llama", num_hidden_layers=1).eval()
    other = copy.deepcopy(plain)
    for parameter in other.parameters():
        parameter.mul_(0.7)
    for format in formats:
        model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport=transport, weights=format, timeout=60.0)
        ring = rtp_ext.ring_of(model)
        with cases.case(f"{format}: forwards"):
            found = rtp_ext.frozen_weights(model)
            assert {name.split(".")[-2] for name in found} == set(LAYERS)
            for name, value in found.items():
                weight = FrozenWeight(format, tuple(value.shape), value.dtype)
                blocks = weight.encode(plain.get_parameter(name), weight.packed_shape[0])
                assert torch.equal(value, weight.decode(blocks)), name
            expected = standing_for(plain, found)
            for step in range(1 + rank % 2):  # ranks run different numbers of forwards
                assert_same(logits(model, rank, step), logits(expected, rank, step), 1e-5, "logits")
            assert differs(logits(model, rank, 0), logits(plain, rank, 0), 1e-4), "control: the values are rounded"
        with cases.case(f"{format}: bytes"):
            packed = [FrozenWeight(format, tuple(value.shape), value.dtype).packed_shape for value in found.values()]
            blocks = sum(ring.exchange(sum(p.to_local().nbytes for n, p in model.named_parameters() if n in found)))
            assert blocks == sum(rows * size for rows, size in packed)
            assert sum(ring.exchange(ring.shard_bytes)) == blocks + 2 * plain.lm_head.weight.nbytes
            slots = ring.slot_count("weight")
            assert (slots.peak_slots > 0) == (transport == "tcp" and ranks > 1)
        with cases.case(f"{format}: new values"):
            ring.exchange("every rank has ended its forwards")
            names = dict(other.named_parameters())
            assert rtp_ext.update_weights(model, names.items()) == len(names)
            found = rtp_ext.frozen_weights(model)
            assert_same(logits(model, rank, 0), logits(standing_for(other, found), rank, 0), 1e-5, "new")
            assert differs(logits(model, rank, 0), logits(expected, rank, 0), 1e-3), "control: the old values"
            first = next(iter(found))
            with pytest.raises(ValueError, match=r"expected shape \(\d+, \d+\), got \(3,\)"):
                rtp_ext.update_weights(model, [(first, torch.zeros(3))])
        ring.exchange("no rank pulls any more")
        ring.close()


@torch.no_grad()
def holds_once(rank, ranks, weights, bytes_of_value):
    with LiveBytes() as live:
        with torch.device("meta"):
            model = wide()
        model = rtp_ext.rotate_for_inference(model, weights=weights, timeout=60.0)
        assert rtp_ext.update_weights(model, values()) == 6
    whole = 6 * 1024 * 1024 * 4
    assert live.peak <= whole / 3 + 4 * MIB, f"{live.peak} bytes at once, the model has {whole} in float32"
    x = random(3, 1024, dtype=torch.float32, seed=rank)
    y = model(x)
    ring = rtp_ext.ring_of(model)
    ring.exchange("every rank has read every shard")
    share = mapped("Pss")
    ring.exchange("measured")
    plain = wide()
    plain.load_state_dict(rtp_ext.frozen_weights(model))
    assert_same(y, plain(x), 1e-5 if weights == "nf4" else 0.1, "values")
    return share, whole * bytes_of_value / 4


@pytest.mark.parametrize(("weights", "bytes_of_value"), [("nf4", 0.5625), ("float8_rowwise", 1 + 4 / 1024)])
def test_host_holds_the_blocks_once(weights, bytes_of_value):
    shares, (blocks, *_) = zip(*run_ranks(holds_once, 3, weights, bytes_of_value), strict=True)
    print(f"PSS of the shards on each rank {shares}, {blocks} bytes of blocks")
    assert all(0.98 * blocks <= 3 * share <= 1.05 * blocks for share in shares), f"{shares} of {blocks}"


@on_ranks(2)
def test_refusals():
    plain = nn.Sequential(nn.Linear(4, 5))
    with pytest.raises(
        ValueError, match=r"expected weights None, 'nf4', 'mxfp4', 'int8', 'float8_tensorwise', .*got 'int4'"
    ):
        rtp_ext.rotate_for_inference(plain, weights="int4")
    with pytest.raises(ValueError, match="weights='nf4' expected weights of linear layers, got none in a Embedding"):
        rtp_ext.rotate_for_inference(nn.Embedding(4, 5), weights="nf4", timeout=60.0)
    with torch.no_grad():
        plain[0].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"0\.weight: expected finite numbers"):
        rtp_ext.rotate_for_inference(plain, weights="nf4", timeout=60.0)
    assert type(plain[0]) is nn.Linear, "a refused model does not change"
    assert plain[0].weight.requires_grad


@torch.no_grad()
def taken(rank, ranks):
    import bitsandbytes

    def four_bit(double: bool) -> nn.Module:
        torch.manual_seed(0)
        options = {"quant_type": "nf4", "compress_statistics": double}
        layers = [bitsandbytes.nn.Linear4bit(64, 130, True, **options), nn.LayerNorm(130), nn.Linear(130, 128)]
        return nn.Sequential(*layers).to("cpu")

    x = torch.randn(5 + rank, 64, generator=torch.Generator().manual_seed(rank))
    for double in (False, True):
        plain = four_bit(double)
        for weights in (None, "int8"):  # the bits of its own, also beside other blocks
            model = rtp_ext.rotate_for_inference(four_bit(double), weights=weights, timeout=60.0)
            found = rtp_ext.frozen_weights(model)
            weight = plain[0].weight
            theirs = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
            assert torch.equal(found["0.weight"], theirs.view(130, 64))
            assert set(found) == {"0.weight", *(["2.weight"] if weights else [])}
            assert_same(model(x), plain(x), 1e-2 if weights else 1e-5, "output")
            assert differs(model(x), plain(x + 0.1), 2e-2), "control"
            dist.barrier()
            rtp_ext.ring_of(model).close()


def test_bitsandbytes_as_it_is():
    pytest.importorskip("bitsandbytes")
    run_ranks(taken, 2)
