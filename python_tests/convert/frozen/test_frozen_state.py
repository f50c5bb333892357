"""Checkpoints of frozen weights in blocks on another number of ranks, loading plain weights into blocks, memory, and
the combinations that are refused."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import Cases, on_ranks, run_ranks
from live_bytes import LiveBytes
from reference import assert_same, full, local
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import rtp_ext
from rtp_ext.convert.validation import call
from rtp_ext.optim import matrices
from rtp_ext.planner.rotation.operations import RotatedOperation, Weight, rtp_bytes

WIDE, LAYERS = 256, 3


def _model(seed: int = 0) -> nn.Module:
    """Layers with groups of one row and of several, a trained one and a norm between them."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 130), nn.LayerNorm(130), nn.Linear(130, 96), nn.Linear(96, 50), nn.Linear(50, 8)]
    model = nn.Sequential(*layers)
    for place in (0, 3):
        model[place].weight.requires_grad_(False)
    return model


def _frozen_values(model: nn.Module) -> list[torch.Tensor]:
    values = rtp_ext.frozen_weights(model)
    assert list(values) == ["0.weight", "3.weight"]
    return [*values.values()]


def _saves(rank, ranks, folder):
    model = rtp_ext.fully_rotate(_model(), frozen="nf4", transport="shm")
    values = _frozen_values(model)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    streamed = dict(rtp_ext.stream_weights(model))
    assert all(torch.equal(streamed[name], value) for name, value in rtp_ext.frozen_weights(model).items())
    for name, shard, _, offsets in rtp_ext.local_shards(model):
        whole = streamed[name][tuple(slice(o, o + n) for o, n in zip(offsets, shard.shape, strict=True))]
        assert torch.equal(shard, whole), f"{name} at {offsets}"
    rtp_ext.ring_of(model).close()
    return [each.double().sum().item() for each in values]


def _loads(rank, ranks, folder, sums):
    cases = Cases()
    model = rtp_ext.fully_rotate(_model(1), frozen="nf4", transport="shm")
    expected = _frozen_values(rtp_ext.fully_rotate(_model(), frozen="nf4", mesh=rtp_ext.ring_of(model)))
    with cases.case("a checkpoint of two ranks"):
        assert not torch.equal(_frozen_values(model)[0], expected[0]), "control"
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder)
        assert all(map(torch.equal, _frozen_values(model), expected))
        assert [each.double().sum().item() for each in _frozen_values(model)] == sums
    with cases.case("blocks of another format"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "FORMATS", ("fp4",))  # of bitsandbytes, whose blocks have the layout of nf4
        other = rtp_ext.fully_rotate(_model(1), frozen="fp4", mesh=rtp_ext.ring_of(model))
        assert local(other[0].weight).numel() == local(model[0].weight).numel(), "the bytes would fit"
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            other.load_state_dict(model.state_dict())
        with pytest.raises(CheckpointException, match=r"Size mismatch between saved .* and current"):
            dcp.load(get_model_state_dict(other), checkpoint_id=folder)
    ring, plain = rtp_ext.ring_of(model), _model(2).state_dict()
    files = f"{folder}/{rank}.safetensors"
    save_file(plain, files)
    wanted = _frozen_values(rtp_ext.fully_rotate(_model(2), frozen="nf4", mesh=ring))
    for what in ("load_state_dict", "assign", "set_model_state_dict", "load_safetensors", "load_safetensors into meta"):
        with cases.case(what):
            if "meta" in what:
                with torch.device("meta"):
                    model = _model()
                model = rtp_ext.fully_rotate(model, frozen="nf4", mesh=ring).to_empty(device="cpu")
            else:
                model = rtp_ext.fully_rotate(_model(), frozen="nf4", mesh=ring)
            if what.startswith("load_safetensors"):
                rtp_ext.load_safetensors(model, files)
            elif what == "set_model_state_dict":
                set_model_state_dict(model, dict(plain), options=StateDictOptions(full_state_dict=True))
            else:
                model.load_state_dict(plain, assign=what == "assign")
            assert all(map(torch.equal, _frozen_values(model), wanted))
            assert torch.equal(full(model[4].weight), plain["4.weight"])
            assert torch.isfinite(model(torch.ones(2, 64))).all()
    with cases.case("init_weights"), pytest.raises(ValueError, match=r"0.weight, which fully_rotate has stored in nf4"):
        rtp_ext.init_weights(model, lambda module: None)
    with cases.case("a weight that is not finite"):
        wrong = {**plain, "0.weight": torch.full_like(plain["0.weight"], float("nan"))}
        save_file(wrong, files)
        with pytest.raises(ValueError, match=r"load_state_dict: 0\.weight: expected finite numbers"):
            model.load_state_dict(wrong)
        with pytest.raises(ValueError, match=r"load_safetensors: 0\.weight: expected finite numbers"):
            rtp_ext.load_safetensors(model, files)
    with cases.case("a shape of another model"), pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**plain, "0.weight": torch.zeros(64, 130)})
    ring.close()
    cases.finish()


def test_state_on_another_number_of_ranks(tmp_path):
    sums = run_ranks(_saves, 2, str(tmp_path))
    assert sums[0] == sums[1]
    run_ranks(_loads, 3, str(tmp_path), sums[0])


def _stack() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)))
    return model.requires_grad_(False)


@on_ranks(4)
def test_bytes_and_memory(ranks, cases):
    """Blocks at home and on the wire take 0.5625 bytes a weight; a step holds two slots of them and one wide shard."""
    weights, shard = LAYERS * WIDE * WIDE, WIDE * WIDE // ranks
    for transport in ("shm", "c10d"):
        with rtp_ext.Ring(transport=transport, timeout=60.0, buffers="lean") as ring:
            with LiveBytes(ring) as live:
                model = rtp_ext.fully_rotate(_stack(), mesh=ring, frozen="nf4")
                held = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
                x = torch.ones(4, WIDE, requires_grad=True)
                model(x).sum().backward()
                live.reset_peak()
                before, resting = ring.bytes_sent("weight"), live.current
                for _ in range(3):
                    model(x).sum().backward()
                peak = live.peak
            counts = [ring.slot_count(channel) for channel in ("weight", "gradient", "scratch")]
            with cases.case(transport):
                assert abs(held - 0.5625 * weights / ranks) <= 0.02 * held
                sent = (ring.bytes_sent("weight") - before) / 3
                assert abs(sent - 2 * (ranks - 1) * 0.5625 * weights / ranks) <= 0.02 * sent
                assert counts[0].peak_bytes <= 2 * 1.02 * 0.5625 * shard and counts[1].bytes == 0
                assert counts[2].peak_bytes == 4 * shard, "one shard in the compute dtype"
                layer = RotatedOperation("linear", (Weight((WIDE, WIDE), frozen="nf4"),))
                planned = rtp_bytes([layer] * LAYERS, ranks, receives_anywhere=transport != "shm", look_ahead=0)
                assert planned.weight_slots_bytes == counts[0].bytes
                assert planned.scratch_bytes == counts[2].bytes and planned.parameters_bytes == held
                assert planned.gradients_bytes == planned.optimizer_bytes == 0
                activations = 4 * 4 * WIDE * (4 * LAYERS)
                assert peak - resting <= activations, f"{peak - resting} bytes beyond slots, scratch and blocks"
                assert activations < 4 * shard, "control: a second wide shard"


@on_ranks(2)
def test_refusals(ranks, cases):
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "ring"))
    dims = {"mesh": mesh, "dims": rtp_ext.RotationDims(ring="ring", replicate="dp")}
    tied = _model()
    tied[3].weight = tied[2].weight = nn.Parameter(torch.ones(96, 130), requires_grad=False)
    infinite = _model()
    with torch.no_grad():
        infinite[0].weight[3, 5] = float("inf")
    for what, model, options, message in (
        ("format", _model(), {"frozen": "nf2"}, "expected frozen to be None, 'nf4', 'mxfp4', 'int8', got 'nf2'"),
        ("in place", _model(), {"in_place": True}, "'nf4' cannot be combined with in_place=True"),
        ("gather", _model(), {"route": "gather"}, "cannot be combined with route='gather'"),
        ("outer policy", _model(), {**dims, "outer": rtp_ext.outer.ZeroOuter()}, "with ZeroOuter"),
        ("nothing frozen", nn.Linear(64, 64), {}, "expected weights of nn.Linear layers or experts with requires_grad"),
        ("tied", nn.ModuleList([tied[2], tied[3]]), {}, "expected weights of nn.Linear layers"),
        ("infinite", infinite, {}, "0.weight: expected finite numbers for frozen='nf4'"),
    ):
        before = [(name, id(parameter)) for name, parameter in model.named_parameters()]
        with cases.case(what), pytest.raises(ValueError, match=message):
            rtp_ext.fully_rotate(model, **{"frozen": "nf4", "transport": "shm", **options})
        with cases.case(f"{what}: nothing changed"):
            assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == before
    with cases.case("emulated"), pytest.raises(ValueError, match="cannot be combined with an emulated ring"):
        rtp_ext.fully_rotate(_model(), mesh=rtp_ext.Ring.emulated(2), frozen="nf4")
    with cases.case("offload on a CPU changes nothing"):
        model = rtp_ext.fully_rotate(_model(), frozen="nf4", offload_policy=CPUOffloadPolicy(), transport="shm")
        assert len(_frozen_values(model)) == 2
        rtp_ext.ring_of(model).close()
    with cases.case("what stays wide"):
        model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.TransformerEncoderLayer(64, 4, 128, 0.0))
        plan = rtp_ext.explain(copy.deepcopy(model.requires_grad_(False)), frozen="nf4", ranks=ranks, device="cpu")
        wide = {row.name: row.wide for row in plan.parameters if row.wide is not None}
        assert set(wide) == {"0.weight", "2.self_attn.in_proj_weight", "2.self_attn.out_proj.weight"}
        assert "Wide, although blocks or products in 8 bits were asked for" in str(plan)
        assert {row.name for row in plan.parameters if row.travel == "nf4"} == {
            "1.weight",
            "2.linear1.weight",
            "2.linear2.weight",
        }
        rounded, ids = copy.deepcopy(model), torch.arange(12).view(3, 4) % 16
        model = rtp_ext.fully_rotate(model, frozen="nf4", transport="shm")
        for name, value in rtp_ext.frozen_weights(model).items():
            rounded.get_parameter(name).copy_(value)
        for training in (True, False):
            expected, found = rounded.train(training)(ids), model.train(training)(ids)
            assert_same(found, expected, 1e-5, f"training {training}")
        hidden, rest = matrices(model)
        assert any(each is model[1].weight for each in rest) and all(each.dtype == torch.float32 for each in hidden)
        torch.optim.AdamW(rest).step()
        after = {row.name: row.wide for row in rtp_ext.explain(model).parameters if row.wide is not None}
        assert after == wide
        rtp_ext.ring_of(model).close()
