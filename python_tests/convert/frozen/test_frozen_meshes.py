"""Frozen weights in blocks as stages of a pipeline, with tensor parallelism and with shards on the host; their slots,
and checkpoints of experts and MLPs on another number of ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from grids import few, schedules
from harness import Cases, on_ranks, run_ranks
from reference import assert_same, differs, full
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import rtp_ext
from rtp_ext import _native
from rtp_ext.functional import rotated_linear_cross_entropy
from rtp_ext.parameters.sharding import frozen_of

TOLERANCE = 1e-6  # float32
WIDTH, ROWS, MICRO = 64, 6, 4
SCHEDULES = [(Schedule1F1B, 2), (ScheduleInterleavedZeroBubble, 4)]  # with the number of stages
SLOTS = [(transport, what) for transport in ("shm", "c10d") for what in ("experts", "mlp", "head")]


def _mlp(features: int, hidden: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaMLP(LlamaConfig(hidden_size=features, intermediate_size=hidden, num_attention_heads=1))


def _experts(features: int, hidden: int, experts: int, seed: int = 0) -> nn.Module:
    module = MixtralExperts(MixtralConfig(hidden_size=features, intermediate_size=hidden, num_local_experts=experts))
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


class Stage(nn.Module):
    """A frozen layer, a frozen MLP and a trained adapter of two layers beside it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.mlp = _mlp(WIDTH, 128, index)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return x + self.mlp(self.linear(x)) + self.up(self.down(x))


def _batch(place: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(place)
    return torch.randn(MICRO * ROWS, WIDTH, generator=generator), torch.randn(MICRO * ROWS, WIDTH, generator=generator)


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


@on_ranks(4)
def test_stages_of_a_pipeline(cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ring"))
    place, stage_of = mesh.get_local_rank("ring"), mesh.get_local_rank("pp")
    for schedule, count in schedules(few(SCHEDULES[1:], SCHEDULES), SCHEDULES):
        torch.manual_seed(1)
        plain = [Stage(index) for index in range(count)]
        mine = {index: copy.deepcopy(plain[index]) for index in range(stage_of, count, 2)}
        made = []
        for index, stage in mine.items():
            rtp_ext.fully_rotate(stage, mesh=mesh["ring"], frozen="nf4", transport="shm", timeout=60.0)
            made.append(PipelineStage(stage, index, count, torch.device("cpu"), group=mesh.get_group("pp")))
        given = [None] * 2
        values = {index: rtp_ext.frozen_weights(stage) for index, stage in mine.items()}
        dist.all_gather_object(given, values, group=mesh.get_group("pp"))
        rounded = nn.Sequential(*copy.deepcopy(plain))
        for index, weights in (item for theirs in given for item in theirs.items()):
            for name, value in weights.items():
                rounded[index].get_parameter(name).data.copy_(value)
        runner = schedule(made[0] if count == 2 else made, n_microbatches=MICRO, loss_fn=_loss)
        x, target = _batch(place)
        losses: list[torch.Tensor] = []
        last = {"target": target, "losses": losses} if count - 1 in mine else {}
        runner.step(*([x] if 0 in mine else []), **last)
        for model in (rounded, nn.Sequential(*plain)):
            sum(_loss(model(x), target) for x, target in map(_batch, range(2))).div(2).backward()
        with cases.case(schedule.__name__):
            for index, stage in mine.items():
                assert len(values[index]) == 4
                for name in ("down.weight", "up.weight"):
                    wanted = rounded[index].get_parameter(name).grad
                    assert_same(full(stage.get_parameter(name).grad), wanted, 2 * TOLERANCE, f"{index}.{name}")
                    assert differs(plain[index].get_parameter(name).grad, wanted, 100 * TOLERANCE), "control"
        for stage in mine.values():
            rtp_ext.ring_of(stage).close()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tp"))
    parallel = parallelize_module(nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh["tp"], {"0": ColwiseParallel()})
    with cases.case("tensor parallelism"), pytest.raises(ValueError, match="cannot be combined with tensor parallel"):
        options = {"mesh": mesh, "dims": rtp_ext.RotationDims(), "transport": "shm"}
        rtp_ext.fully_rotate(parallel.requires_grad_(False), frozen="nf4", **options)


@pytest.mark.parametrize("what", ["offload", "in place"])
def test_refusals(what):
    name, options = "in_place=True", {"in_place": True, "device": "cpu"}
    if what == "offload":  # from a GPU
        name, options = "offload_policy=CPUOffloadPolicy", {"offload_policy": CPUOffloadPolicy(), "device": "cuda"}
    for model in (nn.Linear(64, 64), _mlp(64, 128), nn.ModuleList([_experts(8, 8, 2)])):
        with pytest.raises(ValueError, match=f"'nf4' cannot be combined with {name}"):
            rtp_ext.explain(model.requires_grad_(False), frozen="nf4", ranks=2, **options)


@on_ranks(4)
def test_slots(rank, ranks, cases):
    for transport, what in few([("shm", "experts"), ("c10d", "mlp"), ("c10d", "head")], SLOTS):
        with rtp_ext.Ring(transport=transport, timeout=60.0, buffers="lean") as ring:
            model = {"experts": lambda: _experts(32, 24, 6), "mlp": lambda: _mlp(24, 640), "head": nn.Linear}[what]
            model = nn.Sequential(model() if what != "head" else nn.Linear(64, 302, bias=False))
            rounded = copy.deepcopy(model)
            model = rtp_ext.fully_rotate(model.requires_grad_(False), mesh=ring, frozen="nf4")
            for name, value in rtp_ext.frozen_weights(model).items():
                rounded.get_parameter(name).data.copy_(value)
            features = {"experts": 32, "mlp": 24, "head": 64}[what]
            x = torch.randn(10, features, generator=torch.Generator().manual_seed(rank))
            choice, shares = torch.arange(20).view(10, 2) * 5 % 6, torch.full((10, 2), 0.5)
            targets = torch.arange(10) * 29
            parameters = [*model.parameters()]
            found, expected = [], []
            for _ in range(3):
                mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
                if what == "experts":
                    y, wanted = model[0](mine, choice, shares), rounded[0](theirs, choice, shares)
                elif what == "mlp":
                    y, wanted = model(mine), rounded(theirs)
                else:
                    y = rotated_linear_cross_entropy(mine, model[0].weight, targets, ring=ring)
                    wanted = nn.functional.cross_entropy(rounded(theirs), targets)
                y.sum().backward()
                wanted.sum().backward()
                found.append((y.detach(), mine.grad))
                expected.append((wanted.detach(), theirs.grad))
            counts = [ring.slot_count(channel) for channel in ("weight", "gradient", "scratch")]
            order = [1, 0, 2] if what == "mlp" else range(len(parameters))  # the engine has the gate first
            key = "linear cross-entropy" if what == "head" else what
            planned = _native.footprint(
                [_native.OperationFacts(key, [frozen_of(parameters[place]).facts for place in order])],
                ranks=ranks,
                in_place=False,
                cast=False,
                sends_anywhere=True,
                receives_anywhere=transport != "shm",
                compute_bytes=4,
                reduce_bytes=4,
                slot_cap=0,
                look_ahead=0,
            )
            sent = torch.tensor(float(ring.bytes_sent("weight")))
            dist.all_reduce(sent)
            closed = 3 * 2 * (ranks - 1) * 36 / 64 * sum(p.numel() for p in rounded.parameters())
            with cases.case(f"{what} over {transport}"):
                assert abs(sent.item() - closed) <= 0.02 * closed, (sent, closed)
                for mine, theirs in zip(found, expected, strict=True):
                    for value, wanted in zip(mine, theirs, strict=True):
                        assert_same(value, wanted, 2 * TOLERANCE, what)
                assert counts[1].bytes == 0
                assert counts[0].peak_bytes == planned.weight.peak_bytes > 0, (
                    counts[0].peak_bytes,
                    planned.weight.peak_bytes,
                )
                assert counts[2].peak_bytes == planned.scratch.peak_bytes


def _model(seed: int) -> nn.Module:
    """Experts, an MLP of five blocks of hidden features, and a layer with several rows in a group."""
    modules = nn.ModuleList([_experts(32, 24, 5, seed), _mlp(24, 320, seed), nn.Linear(48, 33)])
    return modules.requires_grad_(False)


def _saves(rank, ranks, folder):
    model = rtp_ext.fully_rotate(_model(0), frozen="nf4", transport="shm")
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    streamed, values = dict(rtp_ext.stream_weights(model)), rtp_ext.frozen_weights(model)
    assert len(values) == 6 and all(torch.equal(streamed[name], value) for name, value in values.items())
    rtp_ext.ring_of(model).close()


def _loads(rank, ranks, folder):
    cases = Cases()
    with rtp_ext.Ring(transport="shm", timeout=60.0) as ring:

        def rotated(model):
            return rtp_ext.fully_rotate(model, mesh=ring, frozen="nf4")

        expected, other = (rtp_ext.frozen_weights(rotated(_model(seed))) for seed in (0, 2))

        def same(model, wanted):
            return all(torch.equal(value, wanted[name]) for name, value in rtp_ext.frozen_weights(model).items())

        model = rotated(_model(1))
        assert not same(model, expected), "control"
        with cases.case("a checkpoint of two ranks"):
            dcp.load(get_model_state_dict(model), checkpoint_id=folder)
            assert same(model, expected)
        plain = {name: value.contiguous() for name, value in _model(2).state_dict().items()}
        save_file(plain, f"{folder}/{rank}.safetensors")
        with cases.case("load_state_dict"):
            model.load_state_dict(plain)
            assert same(model, other)
        with cases.case("load_safetensors into meta"):
            with torch.device("meta"):
                empty = _model(0)
            empty = rotated(empty).to_empty(device="cpu")
            rtp_ext.load_safetensors(empty, f"{folder}/{rank}.safetensors")
            assert same(empty, other)
    cases.finish()


def test_state_on_another_number_of_ranks(tmp_path):
    run_ranks(_saves, 2, str(tmp_path))
    run_ranks(_loads, 3, str(tmp_path))
