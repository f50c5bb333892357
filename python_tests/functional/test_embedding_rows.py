"""Embeddings that send rows instead of their table, against the plain table in one process and against rotation."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import Cases, on_ranks, run_ranks
from operation_checks import check_checkpointing, check_controls, check_pass, check_sharded, train
from operations.layers import ID_FORMS, make_embedding, make_ids
from reference import TOLERANCE, adamw, assert_same, differs, full, local
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import rtp_ext
from rtp_ext.embedding_rows import rows_traffic
from rtp_ext.functional import rotated_embedding
from rtp_ext.nn import RotatedEmbedding
from rtp_ext.ring.routes.route_planner import RoutePlanner, TableSize

TIMEOUT = 30.0
VARIANTS: list[dict[str, Any]] = [
    {"size": (5, 7)},
    {"size": (13, 10), "padding": 4},
    {"size": (13, 10), "padding": -1, "every": True},
    {"size": (3, 2)},  # shards of some ranks are empty
    {"size": (1, 9), "padding": 0},
]


def _parity(rank, ranks):
    cases = Cases()
    for in_place, transport in ((False, "shm"), (True, "c10d")):
        with rtp_ext.Ring(transport=transport, in_place=in_place, embedding="rows", timeout=TIMEOUT) as ring:
            for dim in (0, 1):
                for variant in VARIANTS:
                    for form in ID_FORMS:
                        with cases.case(f"{transport} {dim} {variant} {form}"):
                            check_pass(make_embedding(dim=dim, **variant), ring, form)
                make = partial(make_embedding, (13, 10), dim=dim)
                for dtype in (torch.float32, torch.bfloat16):
                    with cases.case(f"{transport} {dim} {dtype}"):
                        check_pass(make(dtype=dtype), ring, tolerances=(0.0, TOLERANCE[dtype]))
                if ranks > 1:
                    check_controls(make(every=True), ring, (1e-10, 1e-10))
                with cases.case(f"{transport} {dim} training"):
                    train(make(padding=2), rank, ranks, True, torch.float64, ring=ring)
                check_checkpointing(cases, make(), ring)
                with cases.case(f"{transport} {dim} modules"):
                    check_sharded(make(padding=3), ring)
            assert ring.hops("weight") == ring.hops("gradient") == 0
    cases.finish()


@pytest.mark.parametrize("ranks", few([1, 3], [1, 2, 3, 4]))
def test_outputs_gradients_and_training(ranks):
    run_ranks(_parity, ranks)


class _Sent:
    """Bytes that all_to_all_single sends to other ranks, by pass: those of a forward and of its backward."""

    def __init__(self, rank: int) -> None:
        self.rank, self.bytes, self.real = rank, 0, dist.all_to_all_single

    def __call__(self, out, given, *, output_split_sizes, input_split_sizes, **options):
        away = sum(input_split_sizes) - input_split_sizes[self.rank]
        self.bytes += away * given.element_size()
        return self.real(
            out, given, output_split_sizes=output_split_sizes, input_split_sizes=input_split_sizes, **options
        )

    def taken(self) -> int:
        sent, self.bytes = self.bytes, 0
        return sent


@on_ranks(few([3], [2, 3, 4]), embedding="rows")
def test_bytes_are_those_of_the_closed_form(rank, ranks, ring, cases):
    """Ids evenly spread over the table: as many of each row as of any other."""
    dist.all_to_all_single = sent = _Sent(rank)
    rows, features, times = 24, 30, 3
    ids = torch.arange(rows).repeat(times)
    policies = [(torch.float32, None, 4, 4), (torch.bfloat16, None, 2, 2), (torch.float32, torch.bfloat16, 4, 2)]
    for dim in (0, 1):
        for compute, reduce, row, gradient in policies:
            for trained in (True, False):
                with cases.case(f"{dim} {compute} {reduce} {trained}"):
                    module = RotatedEmbedding(rows, features, ring=ring, shard_dim=dim)
                    module.mp_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
                    module.weight.requires_grad_(trained)
                    sent.taken()
                    y = module(ids)
                    expected = rows_traffic(
                        (rows, features), dim, ranks, rank, len(ids), row, gradient if trained else 0
                    )
                    assert sent.taken() == round(expected.forward)
                    if trained:
                        y.sum().backward()
                    assert sent.taken() == round(expected.gradients)
                    assert expected.messages == (4 if trained else 2) * (ranks - 1)
                    whole = rows_traffic((rows, features), dim, ranks, rank, len(ids) + 1, row, gradient)
                    assert whole.forward > expected.forward, "control"


def _bits(rank, ranks):
    """On a CPU the sums of float32 have the bits of rotation, and so again; also where ids of one rank are many."""
    found = []
    for way in ("rotate", "rows", "rows"):
        with rtp_ext.Ring(embedding=way, timeout=TIMEOUT) as ring:
            for dim in (0, 1):
                torch.manual_seed(0)
                module = RotatedEmbedding(7, 9, padding_idx=3, ring=ring, shard_dim=dim)
                generator = torch.Generator().manual_seed(rank)
                ids = torch.randint(7, ((200, 0, 33, 50)[rank],), generator=generator)
                y = module(ids)
                (y * torch.randn(y.shape, generator=generator)).sum().backward()
                found.append((y.detach(), local(module.weight.grad)))
    for rotated, rows, again in zip(found[:2], found[2:4], found[4:], strict=True):
        for a, b, c in zip(rotated, rows, again, strict=True):
            assert torch.equal(a, b) and torch.equal(b, c)
    assert rank == 1 or found[0][0].any()


def test_sums_have_the_bits_of_rotation():
    run_ranks(_bits, 4)


@on_ranks(3, embedding="rows")
def test_wrong_ids_raise_on_every_rank(rank, ranks, ring):
    """Where one rank has them, the ring can go on."""
    for dim in (0, 1):
        module = RotatedEmbedding(16, 5, ring=ring, shard_dim=dim)
        for bad in (16, -1):
            ids = torch.tensor([0, bad if rank == 1 else 3] * rank, dtype=torch.int64)
            with pytest.raises(IndexError, match=rf"\[0, 16\), got ids from .*{bad}.* on rank 1"):
                module(ids)
        ids = make_ids("2d", 16, rank, 3)
        assert_same(module(ids), F.embedding(ids, full(module.weight)), 0.0, "after errors")


@on_ranks(2, embedding="rows", ring_timeout=10.0)
def test_ranks_in_different_passes_do_not_mix_rows(rank, ranks, ring):
    modules = [RotatedEmbedding(16, 5, ring=ring) for _ in range(2)]
    for name, module in zip("ab", modules, strict=True):
        module.qualified_name = name
        module(torch.tensor([1, 2]))
    with pytest.raises(rtp_ext.RotationError):
        modules[rank](torch.tensor([1, 2]))


def test_emulated_rings_repeat_the_shard():
    shard = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for dim in (0, 1):
        grads = []
        for way in ("rotate", "rows"):
            with rtp_ext.Ring.emulated(3, embedding=way) as ring:
                ids = torch.tensor([0, 3, 3, 1] if dim else [0, 11, 5, 4, 4])
                y = rotated_embedding(ids, shard, ring=ring, shard_dim=dim, padding_idx=3)
                assert torch.equal(y, F.embedding(ids, torch.cat([shard] * 3, dim)))
                grads += torch.autograd.grad(y.square().sum(), shard)
        assert_same(grads[1], grads[0], 1e-12, "gradient")


@pytest.mark.parametrize(("given", "told"), [({"embedding": "both"}, "rotate, rows, got"), ({}, "in which|to which")])
def test_refused_options(given, told):
    with pytest.raises(ValueError, match=told):
        rtp_ext.Ring.emulated(2, **{"embedding": "rows", "travel": "int8", **given})


def _different(rank, ranks):
    with pytest.raises(ValueError, match=r"disagree.*embedding r"):
        rtp_ext.Ring(embedding=("rows", "rotate")[rank], timeout=TIMEOUT)


def test_ranks_compare_the_option():
    run_ranks(_different, 2)


# -- whole models ------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two tables, one of them tied to the head, or both alone."""

    def __init__(self, tied: bool, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.other = nn.Embedding(701, 64, padding_idx=5), nn.Embedding(4, 64)
        self.head = nn.Linear(64, 701, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.other.weight.requires_grad_(False)
        self.double()

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids) + self.other(ids % 4)))


def _ids(step, rank):
    return torch.randint(701, (3 + 2 * rank + step % 3,), generator=torch.Generator().manual_seed(99 * step + rank))


def _loss(model, ids):
    return F.cross_entropy(model(ids), ids.flip(0)) if len(ids) else model(ids).sum()


def _models(rank, ranks, way):
    """Five steps with accumulated gradients, without one rank's tokens in a step; the bytes are worth it for `auto`."""
    import rtp_ext.ring.routes.route_planner as planner

    planner.ROWS_MARGIN = 0
    cases = Cases()
    for tied in (False, True):
        for frozen in (False, True):
            with cases.case(f"tied {tied} frozen {frozen}"), rtp_ext.Ring(embedding=way, timeout=TIMEOUT) as ring:
                plain, lacking = Model(tied, frozen), Model(tied, frozen)
                model = rtp_ext.fully_rotate(Model(tied, frozen), mesh=ring)
                trained = ([p for p in each.parameters() if p.requires_grad] for each in (model, plain, lacking))
                optimizers = [*map(adamw, trained)]
                for step in range(5):
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    for part in range(2):
                        batches = [_ids(10 * step + part, r)[: None if step != 3 or r else 0] for r in range(ranks)]
                        _loss(model, batches[rank]).backward()
                        for each, others in ((plain, batches), (lacking, batches[:-1])):
                            (sum(_loss(each, ids) for ids in others) / ranks).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                plans = {name: plan.by_rows for name, plan in ring.gate.tables.items()}
                assert plans == {"embed": True, "other": way == "rows"}, plans  # 4 rows, and more tokens
                for name, parameter in plain.named_parameters():
                    mine = full(model.get_parameter(name))
                    assert_same(mine, parameter, 1e-8, name)
                    if parameter.requires_grad and ranks > 1:
                        assert differs(mine, lacking.get_parameter(name), 1e-8), f"control: {name} lacks a rank"
                rows = {row.name: row for row in rtp_ext.explain(model).parameters}
                seen = rows["embed.weight"]
                assert (seen.route, seen.gradient_route, seen.sent_bytes) == ("rows", "rows", 0)
                tokens = ring.gate.tables["embed"].tokens
                assert tokens == max(len(_ids(10 * s + p, ranks - 1)) for s in range(4) for p in range(2))
                sent = rows_traffic((701, 64), 1, ranks, rank, tokens, 8, 8)
                assert seen.collective_bytes == (None if tied else sent.forward + sent.gradients)
                assert "rows" in str(rtp_ext.explain(model))
    cases.finish()


@pytest.mark.parametrize(("way", "ranks"), [("auto", 3), ("rows", 2)])
def test_models_train_as_in_one_process(way, ranks):
    run_ranks(_models, ranks, way)


def test_auto_takes_fewer_bytes():
    """Before the ranks have counted tokens, alone, and with a travel dtype, the table travels."""
    table = TableSize((128256, 4096), 1, 2, 2, 4, 2)
    planner = RoutePlanner(8, torch.device("cpu"), "ring", "auto", None, embedding="auto")
    taken = {tokens: planner.plan_table("t", tokens, table).by_rows for tokens in (None, 1, 8192, 190_000, 192_000)}
    assert taken == {None: False, 1: True, 8192: True, 190_000: True, 192_000: False}
    small = TableSize((100, 64), 1, 4, 4, 4, 4)
    assert not planner.plan_table("t", 1, small).by_rows, "fewer bytes, but not worth the exchange of counts"
    for ranks, gathers in ((8, False), (1, True)):
        planner = RoutePlanner(ranks, torch.device("cpu"), "ring", "auto", None, gathers=gathers, embedding="auto")
        assert not planner.plan_table("t", 1, table).by_rows
