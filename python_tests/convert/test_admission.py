"""Refusals and warnings of fully_rotate, and the comparison of the ranks before the first forward."""

import contextlib
import logging

import pytest
import torch
from harness import on_ranks
from models import LanguageModel, batch_loss, make_batch, make_model
from reference import adamw, assert_same, random
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import rtp_ext
from rtp_ext.convert import scopes


@contextlib.contextmanager
def _records():
    """The messages of the package's log."""
    logger, found = logging.getLogger("rtp_ext"), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


@on_ranks([3, 4])
def test_parameters_of_others_are_refused(rank, ranks, cases):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if ranks == 4 else None
    flat = init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
    ours = grid["dp"] if grid else flat

    def parallel(mesh):
        return parallelize_module(make_model(), mesh, {"blocks.0.up": ColwiseParallel()})

    def sharded():
        model = make_model()
        fully_shard(model.blocks[1], mesh=flat)
        return model

    def rotated(mesh):
        model = make_model()
        model.head = rtp_ext.nn.RotatedLinear.from_module(model.head, rtp_ext.Ring(mesh))
        return model

    where = r"\(Linear\), a DTensor with placements \(Shard\(dim=0\),\) on a mesh \('{}',\) of ranks \["
    candidates = {
        "tensor parallel on our mesh": (lambda: parallel(flat), flat, "blocks.0.up " + where.format("all")),
        "fully_shard of the root": (
            lambda: fully_shard(make_model().blocks[0], mesh=flat),
            flat,
            "the root .*FSDPModule manages",
        ),
        "fully_shard of a block": (sharded, flat, "blocks.1 .*FSDPModule manages"),
        "FSDP": (
            lambda: FullyShardedDataParallel(make_model().blocks[0], device_id=CPU),
            flat,
            "FullyShardedDat",
        ),
        "DDP": (lambda: nn.parallel.DistributedDataParallel(make_model()), flat, "DistributedDataParallel manages"),
    }
    if grid:
        candidates["tensor parallel on another"] = (lambda: parallel(grid["tp"]), ours, "up " + where.format("tp"))
        text = r"head \(RotatedLinear\) is sharded over a mesh \('tp',\) of ranks .* expected a mesh \('dp',\)"
        candidates["rotated over another"] = (lambda: rotated(grid["tp"]), ours, text)
    for name, (build, mesh, match) in candidates.items():
        with cases.case(name):
            model = build()
            before = [(type(m), dict(m._parameters)) for m in model.modules()]
            with pytest.raises(ValueError, match=match):
                rtp_ext.fully_rotate(model, mesh=mesh)
            for module, (kind, parameters) in zip(model.modules(), before, strict=True):
                assert type(module) is kind and all(module._parameters[k] is p for k, p in parameters.items())
    with cases.case("not refused: ours already, and what the caller answers for"):
        model = rtp_ext.fully_rotate(rotated(ours), mesh=ours)
        model(make_batch(rank, 0)[0])
        model = sharded()
        rtp_ext.fully_rotate(model, mesh=flat, ignored_params=model.blocks[1].parameters())
        batch_loss(model, rank, 0).backward()
        assert all(isinstance(p, DTensor) for p in model.parameters())


CPU = torch.device("cpu")


class _Scaled(nn.Module):
    """A user's module, whose extra_repr contains its rank, its device and an address."""

    def __init__(self, rank: int, factor: float = 2.0) -> None:
        super().__init__()
        self.rank, self.factor, self.seen = rank, factor, 10 * rank
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3 + rank), persistent=False)

    def extra_repr(self):
        ranks = f"rank={self.rank}, ep_rank={self.rank}, rank_id={self.rank}"
        at = f"device=cuda:{self.rank}, {ranks}, hook=<f at 0x{id(self):x}>, of {tuple(self.weight.shape)}"
        return f"{at}, factor={self.factor}"

    def forward(self, x):
        return x * self.weight * self.factor


class _Speaks(_Scaled):
    """Prints values, which must not be read before the ranks agree."""

    def extra_repr(self):
        return f"mean={self.weight.mean().item()}, table={self.table.sum().item() + self.rank}"


class _Other(_Scaled):
    pass


class _Closes(_Scaled):
    """Gives something back when it ends."""

    ended = 0

    def __del__(self):
        _Closes.ended += 1


# what differs on the last rank: (module there and elsewhere, what the error says)
DIFFERENT = {
    "stride": (lambda odd: nn.Conv1d(2, 4, 3, stride=2 if odd else 1), r"stride of 1: expected \(1,\) .* got \(2,\)"),
    "padding": (lambda odd: nn.Conv1d(2, 4, 3, padding=int(odd)), r"padding of 1: expected \(0,\)"),
    "padding_mode": (
        lambda odd: nn.Conv1d(2, 4, 3, padding_mode="circular" if odd else "zeros"),
        "padding_mode of 1: expected 'zeros' .* got 'circular'",
    ),
    "padding_idx": (lambda odd: nn.Embedding(5, 4, padding_idx=int(odd)), "padding_idx of 1: expected 0 .* got 1"),
    "num_heads": (lambda odd: nn.MultiheadAttention(4, 2 if odd else 1), "num_heads of 1: expected 1 .* got 2"),
    "batch_first": (lambda odd: nn.MultiheadAttention(4, 2, batch_first=odd), "batch_first of 1: expected False"),
    "eps": (lambda odd: nn.LayerNorm(4, eps=1e-6 if odd else 1e-5), "eps of 1: expected 1e-05 .* got 1e-06"),
    "p": (lambda odd: nn.Dropout(0.5 if odd else 0.1), "p of 1: expected 0.1 .* got 0.5"),
    "class": (lambda odd: nn.ReLU() if odd else nn.GELU(), "class of 1: expected GELU .* got ReLU"),
    "approximate": (lambda odd: nn.GELU("tanh" if odd else "none"), "approximate of 1: expected 'none'"),
    "activation": (
        lambda odd: nn.TransformerEncoderLayer(4, 2, 4, activation="gelu" if odd else "relu"),
        "activation of 1: expected relu .* got gelu",
    ),
    "norm_first": (lambda odd: nn.TransformerEncoderLayer(4, 2, 4, norm_first=odd), "norm_first of 1: expected False"),
    "lstm": (lambda odd: nn.LSTM(4, 2, batch_first=odd), "batch_first of 1: expected False"),
    "own class": (
        lambda odd: (_Other if odd else _Scaled)(0),
        "class of 1: expected Gathered_Scaled .* got Gathered_O",
    ),
    "own settings": (lambda odd: _Scaled(0, 3.0 if odd else 2.0), "settings of 1: .*factor=2.0 .* factor=3.0"),
    "bundle": (
        lambda odd: nn.Sequential(nn.Linear(4, 4), nn.Dropout() if odd else nn.ReLU(), nn.Linear(4, 4)),
        "class of 1: expected RotatedSequential .* got Sequential",
    ),
    "extra module": (
        lambda odd: nn.Sequential(*[nn.Identity()] * 1, *([nn.Tanh()] if odd else [])),
        "class of 1.1: expected nothing .* got Tanh",
    ),
}


def _differing_buffer(odd, key="table", dtype=torch.float32):
    module = _Scaled(0)
    module.register_buffer(key, torch.zeros(4 if odd else 3, dtype=dtype))
    return module


DIFFERENT["buffer"] = (_differing_buffer, r"buffer table of 1: expected \[3\] torch.float32 .* got \[4\]")


@on_ranks([2, 3])
def test_ranks_compare_settings(rank, ranks, ring, cases):
    for name, (build, match) in DIFFERENT.items():
        with cases.case(name):
            model = rtp_ext.fully_rotate(nn.Sequential(nn.Identity(), build(rank == ranks - 1)), mesh=ring)
            with pytest.raises(ValueError, match=f"Sequential: the model differs between ranks: {match}") as raised:
                model(torch.ones(2, 4))
            assert "(rank 0), got " in str(raised.value) and f"on rank {ranks - 1}" in str(raised.value)
    with cases.case("hooks that end a bundle"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        rtp_ext.fully_rotate(model, mesh=ring)
        if rank == 0:
            model[1].register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"bundle of the root: expected False .* got True, recompute=False"):
            model(torch.ones(2, 4))
    with cases.case("what may differ"):
        model = nn.Sequential(_Scaled(rank), _Speaks(rank), nn.Dropout(0.0), nn.Linear(3, 3), _Closes(rank))
        model.worker = rank
        model[3].rank, model[3].in_use = rank, rank == 0
        model.train(rank == 0)
        rtp_ext.fully_rotate(model, mesh=ring)
        model(torch.ones(2, 3)).sum().backward()
        assert _Closes.ended == 0
    with cases.case("a parameter at the address of one that is gone"), pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(scopes, "id", lambda _: 0, raising=False)
        for _ in range(2):
            model[0].adapter = nn.Parameter(torch.ones(3))
            model(torch.ones(2, 3))
            (model[0].adapter * (rank + 1)).sum().backward()
            assert_same(model[0].adapter.grad, torch.full((3,), (ranks + 1) / 2), 0.0, "averaged")
            del model[0].adapter
    with cases.case("a newcomer whose tensor was swapped"), pytest.MonkeyPatch.context() as patch:
        model[0].adapter = nn.Parameter(torch.ones(3))
        called = []
        model[0].adapter.register_post_accumulate_grad_hook(lambda _: called.append(True))
        for flag in (False, True):
            patch.setattr(torch.__future__, "_swap_module_params_on_conversion", flag)
            model.double(), model.float()
            model.zero_grad()
            model(torch.ones(2, 3))
            (model[0].adapter * (rank + 1)).sum().backward()
            assert_same(model[0].adapter.grad, torch.full((3,), (ranks + 1) / 2), 0.0, f"averaged, swap={flag}")
        assert len(called) == 2, "hooks of others are called as well"
    assert ring.alive


@on_ranks([2, 3])
def test_messages(rank, ring):
    ids = make_batch(rank, 0)[0]
    for everywhere in (True, False):
        with torch.device("meta" if everywhere or rank == 1 else "cpu"):
            model = rtp_ext.fully_rotate(LanguageModel(), mesh=ring)
        text = r"got temperature, embed.weight, .* and 12 more still on the meta device"
        with pytest.raises(ValueError, match=text + ("" if everywhere else " on rank 1") + r": call to_empty\("):
            model(ids)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(0.01)
        model(ids)

    # An optimizer of the plain parameters trains nothing.
    model = make_model()
    early = adamw(model.parameters())
    bystander = adamw([torch.zeros(3, requires_grad=True)])
    rtp_ext.fully_rotate(model, mesh=ring, ignored_params=[model.temperature])
    batch_loss(model, rank, 0).backward()
    with pytest.raises(ValueError, match=r"holds the plain LanguageModel.embed.weight.* after fully_rotate"):
        early.step()
    bystander.step()
    adamw(model.parameters()).step()
    model = make_model()
    ignored = adamw([model.temperature])
    rtp_ext.fully_rotate(model, mesh=ring, ignored_params=[model.temperature])
    ignored.step()

    # Ranks that were seeded differently
    for odd in (False, True):
        with _records() as records:
            torch.manual_seed(5 if odd and rank == 1 else 4)
            model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 5), nn.Conv2d(2, 2, 3), nn.Linear(5, 1))
            rtp_ext.fully_rotate(model, mesh=ring)
        warnings = [text for level, text in records if level == "WARNING"]
        warned = odd and rank == 0  # one warning for the ring
        assert len(warnings) == int(warned), warnings
        assert not warned or "values of 1.weight on rank 1 are not those on rank 0" in warnings[0], warnings
    with _records() as records:  # values of ignored parameters are the caller's; in bfloat16, transposed, and empty
        model = nn.Sequential(nn.Linear(2, 3, dtype=torch.bfloat16), nn.Linear(4, 3), nn.Linear(3, 0))
        with torch.no_grad():
            model[0].weight.copy_(random(3, 2, dtype=torch.float64, seed=rank))
            model[1].weight = nn.Parameter(random(4, 3, dtype=torch.float32, seed=1).t())
            model[1].bias.zero_()
            model[0].bias.zero_()
        rtp_ext.fully_rotate(model, mesh=ring, ignored_params=[model[0].weight])
    assert not [text for level, text in records if level == "WARNING"], records
