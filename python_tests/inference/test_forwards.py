"""Models that rotate_for_inference has converted compute as the plain model does, and no rank waits for another."""

import contextlib
import copy
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from hf_models import inputs_of, make, make_batch
from models import VOCABULARY, make_model
from pretended_hosts import pretend_hosts
from reference import assert_same, differs, random
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import rtp_ext
from rtp_ext._native import Execution, make_schedule


def logits(model: nn.Module, kind: str, rank: int, step: int, dtype=torch.float64) -> torch.Tensor:
    if kind == "small":
        generator = torch.Generator().manual_seed(100 * rank + step)
        return model(torch.randint(VOCABULARY, (2, 3 + 4 * rank + step), generator=generator))
    return model(**inputs_of(make_batch(kind, rank, step), dtype)).logits


def test_schedule():
    for ranks in (1, 2, 5):
        schedule = make_schedule(ranks, ranks // 2, pass_="forward", sourced=True)
        assert [step.action for step in schedule.steps] == ["compute"] * ranks
        assert [step.owner for step in schedule.steps] == [(ranks // 2 - s) % ranks for s in range(ranks)]
        assert (schedule.weight_slots, schedule.gradient_slots) == (0, 0)
    assert any(step.action == "hop" for step in make_schedule(2, 0, pass_="forward").steps), "control"
    with pytest.raises(ValueError, match="forwards only, got a backward: fully_rotate"):
        make_schedule(2, 0, pass_="backward", sourced=True)


class Layers(nn.Module):
    """Layers that language models do not have: convolutions, attention, an embedding that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, groups=1)
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(10, 2, kdim=7, vdim=7, batch_first=True)  # stays whole
        self.table = nn.Embedding(VOCABULARY, 10, max_norm=1.0)
        self.out = nn.Linear(10, 3)

    def forward(self, rank: int) -> torch.Tensor:
        maps = self.conv(random(2, 3, 5 + rank, 5, dtype=torch.float64, seed=rank)).flatten(2).transpose(1, 2)
        x = self.table(torch.arange(4 + rank) % VOCABULARY).expand(2, -1, -1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.out(x + self.cross(x, maps, maps, need_weights=False)[0])


KINDS = ("small", "llama", "gpt2", "mixtral", "vit", "bert")
# Sums over owners in another order (bundled MLPs, weights cut by inputs) and RMSNorm in float32 round differently.
TOLERANCES = {"small": 1e-12, "gpt2": 1e-12, "vit": 1e-12, "bert": 1e-12, "llama": 1e-6, "mixtral": 1e-6}


def build(kind: str) -> nn.Module:
    return make_model(tied=True) if kind == "small" else make(kind, torch.float64).eval()


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "kinds", "transport"),
    [
        *((1, KINDS[:1], "shm"), (2, KINDS, "auto"), (3, KINDS[:4], "shm"), (4, KINDS[:2], "shm")),
        *((2, KINDS[2:4], "tcp"), (4, KINDS[:2], "tcp")),
    ],
)
def test_forwards(rank, ranks, cases, kinds, transport):
    for kind in kinds:
        plain = build(kind)
        model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport=transport, timeout=60.0)
        ring = rtp_ext.ring_of(model)
        assert ring.transport == ("shm" if transport == "auto" else transport)
        other = copy.deepcopy(plain)
        with torch.no_grad():  # control: one row of each matrix
            for parameter in other.parameters():
                if parameter.dim() == 2:
                    parameter[-1] += 0.5
        with cases.case(f"{kind}: forwards"):
            for step in range(1 + rank % 2):  # ranks run different numbers of forwards, of different lengths
                with torch.inference_mode() if step else torch.no_grad():
                    actual, expected = logits(model, kind, rank, step), logits(plain, kind, rank, step)
                assert_same(actual, expected, TOLERANCES[kind], "logits")
            with torch.no_grad():
                assert differs(actual, logits(other, kind, rank, step), TOLERANCES[kind]), "control: a changed weight"
        with cases.case(f"{kind}: slots"):
            slots = ring.slot_count("weight").peak_slots
            ahead = rank % 2  # in the second forward
            assert slots == (min(2, ranks - 1 + ahead) if transport == "tcp" else 0), slots
            assert ring.hops("weight") == 0
        if transport == "tcp":
            ring.exchange("no rank pulls any more")
        ring.close()


def integers(*shape, most, seed):
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


@on_ranks(3)
def test_bitwise_autocast_and_other_layers(rank, cases):
    """The same products in the same order as on a ring that trains."""
    x = random(5, 13, dtype=torch.float32, seed=rank)
    plain = nn.Sequential(nn.Linear(13, 11), nn.Linear(11, 7, bias=False))
    with torch.no_grad():
        for seed, parameter in enumerate(plain.parameters()):
            parameter.copy_(random(*parameter.shape, dtype=torch.float32, seed=50 + seed))
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=60.0)
    trained = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=60.0, route="direct")
    with torch.no_grad():
        with cases.case("as the ring that trains"):
            assert torch.equal(model(x), trained(x))
        with cases.case("as the plain model"):
            assert_same(model(x), plain(x), 1e-6, "float32")
        for dtype in (torch.float32, torch.float64, torch.bfloat16):  # sums of integers are exact in any order
            with cases.case(f"bitwise as the plain model, integers in {dtype}"):
                whole = [integers(*p.shape, most=8, seed=seed) for seed, p in enumerate(plain.parameters())]
                if dtype == torch.bfloat16:  # which rounds the inputs of the second layer
                    whole[2] = torch.eye(7, 11)
                exact = nn.Sequential(nn.Linear(13, 11), nn.Linear(11, 7, bias=False)).to(dtype)
                for parameter, value in zip(exact.parameters(), whole, strict=True):
                    parameter.copy_(value)
                found = rtp_ext.rotate_for_inference(copy.deepcopy(exact), timeout=60.0)
                y = integers(5 + rank, 13, most=8, seed=9 + rank).to(dtype)
                assert torch.equal(found(y), exact(y))
                y[0, 0] += 1
                assert not torch.equal(found(y), exact(y - 1)), "control"
        with cases.case("torch.compile"):
            assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
        with cases.case("autocast"), torch.autocast("cpu", torch.bfloat16):
            actual, expected = model(x), plain(x)
            assert actual.dtype == torch.bfloat16
            assert_same(actual, expected, 2e-2, "bfloat16")
            assert differs(actual, plain(x + 1), 2e-2), "control"
    with cases.case("layers"):
        torch.manual_seed(3)
        plain = Layers().double()
        model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=60.0)
        with torch.no_grad():
            assert_same(model(rank), plain(rank), 1e-12, "layers")
        whole = {name for name, p in model.named_parameters() if type(p) is nn.Parameter}
        assert whole == {name for name in whole if name.startswith(("cross.", "table."))} != set(), whole
        ring = rtp_ext.ring_of(model)
        expected_bytes = sum(p.nbytes for name, p in plain.named_parameters() if name in whole)
        assert ring.whole_bytes == expected_bytes and str(expected_bytes) in repr(ring)
    with cases.case("backward"):
        x.requires_grad_()
        with pytest.raises(ValueError, match=r"rotate_for_inference .* forwards only, got a backward: fully_rotate"):
            rtp_ext.rotate_for_inference(nn.Sequential(nn.Linear(13, 11)), timeout=60.0)(x).sum().backward()
        x.grad = None


@on_ranks(2)
def test_generate_with_caches_and_different_lengths(rank):
    rtp_ext.fully_rotate(nn.Linear(2, 2))  # control: it patches `generate` of models that train, whose ranks wait
    plain = make("llama").eval()
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=60.0)
    prompt = torch.arange(1, 4 + rank).unsqueeze(0)
    options = {"max_new_tokens": 3 + 3 * rank, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


# -- no rank waits -----------------------------------------------------------------------------------------------------


@on_ranks()
@pytest.mark.parametrize(("ranks", "transport"), [(3, "shm"), (3, "tcp"), (4, "shm+tcp")])
def test_no_rank_waits_for_another(rank, ranks, transport):
    """Rank 0 runs all its forwards while the others sleep, raise and compute; then they run theirs, and it serves."""
    if transport == "shm+tcp":
        pretend_hosts(rank, ranks // 2)
    plain = make_model()
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport=transport, timeout=5.0)
    store = dist.distributed_c10d._get_default_store()
    with torch.no_grad():
        if rank == 0:
            for step in range(3):
                assert_same(logits(model, "small", rank, step), logits(plain, "small", rank, step), 1e-12, f"{step}")
            assert not store.check(["rank 1 woke"]), "control: rank 1 slept"
            store.set("rank 0 has ended", "")
            dist.barrier()  # it has finished, and serves
        elif rank == 1:
            store.wait(["rank 0 has ended"])
            store.set("rank 1 woke", "")
        else:
            with pytest.raises(IndexError):
                model(torch.full((1, 2), VOCABULARY))  # an error of this rank's own
            while not store.check(["rank 0 has ended"]):
                logits(plain, "small", rank, 0)
        if rank > 0:
            assert_same(logits(model, "small", rank, 9), logits(plain, "small", rank, 9), 1e-12, "afterwards")
            dist.barrier()
    control = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=1.0)
    group = dist.new_group(timeout=timedelta(seconds=1))
    waits = fully_shard(nn.Linear(8, 8), mesh=DeviceMesh.from_group(group, "cpu"))
    if rank == 0:
        with torch.no_grad():
            with pytest.raises(rtp_ext.RingTimeout):
                logits(control, "small", rank, 0)
            with pytest.raises(RuntimeError, match="Timed out"):
                waits(torch.ones(1, 8))
        store.set("the controls have ended", "")
    else:
        store.wait(["the controls have ended"])


def ended(pid: int) -> None:
    """Waits for the end of a process, which may stay a zombie until its parent reaps it."""
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)


@on_ranks(3, lost=[1])
def test_a_rank_that_was_killed(rank, ranks):
    """Over shm its memory stays; over tcp its shards are gone."""
    plain = make_model()
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=5.0)
    pulling = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport="tcp", timeout=5.0)
    block = next(part for part in make("mixtral").modules() if type(part).__name__ == "MixtralExperts").eval()
    choosing = rtp_ext.rotate_for_inference(copy.deepcopy(block), transport="tcp", timeout=5.0)
    own = torch.full((3, 1), -(-block.num_experts // ranks) * rank)
    x, weights = torch.ones(3, block.hidden_dim), torch.ones(3, 1)
    pids = rtp_ext.ring_of(model).exchange(os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ended(pids[1])
    with torch.no_grad():
        assert_same(logits(model, "small", rank, 0), logits(plain, "small", rank, 0), 1e-12, "without rank 1")
        for _ in range(2):  # no other ring of this rank ends, and neither does this one
            with pytest.raises(rtp_ext.RotationError, match="a pull of shards from rank 1 of the ring at"):
                logits(pulling, "small", rank, 0)
        theirs = torch.full_like(own, -(-block.num_experts // ranks))
        with pytest.raises(rtp_ext.RotationError, match="a pull of shards from rank 1 of the ring at"):
            choosing(x, theirs, weights)
        assert_same(choosing(x, own, weights), block(x, own, weights), 1e-5, "a pass that does not need rank 1")
        assert differs(choosing(x, own, weights), block(x, theirs, weights), 1e-5), "control: another expert"
    rtp_ext.ring_of(pulling).communicator.executor.check_alive("afterwards")
    start = time.monotonic()
    for each in (model, pulling, choosing):
        rtp_ext.ring_of(each).close()
    assert time.monotonic() - start < 3.0, "close waits for no rank"
    with torch.no_grad(), pytest.raises(rtp_ext.RotationError, match="it was closed"):
        logits(model, "small", rank, 0)


@on_ranks(2, lost=[1])
def test_the_next_shard_is_pulled_while_a_rank_computes(rank):
    """The shard of the next owner arrives while a rank computes with the one before."""
    model = rtp_ext.rotate_for_inference(nn.Sequential(nn.Linear(8, 6, bias=False)), transport="tcp", timeout=5.0)
    ring = rtp_ext.ring_of(model)
    pids = ring.exchange(os.getpid())
    local = model[0].weight.to_local().detach()
    dtypes = {"compute_dtype": local.dtype, "reduce_dtype": local.dtype}
    options = ring.route_plan.rotation("layer", route="direct", halves=False, slot_cap=0, in_place=False, **dtypes)
    shapes = [[(3, 8)] * 2]

    def begin():
        execution = Execution.forward(ring.communicator.executor, [local], shapes, options)
        assert execution.next().owner == rank
        return execution

    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["pulled"])
        os.kill(os.getpid(), signal.SIGKILL)
    ahead, late = begin(), begin()
    assert torch.equal(ahead.weight()[0], local)
    time.sleep(1.0)  # a product that lasts
    dist.distributed_c10d._get_default_store().set("pulled", "")
    ended(pids[1])
    assert ahead.next().owner == late.next().owner == 1
    assert ahead.weight()[0].shape == (3, 8) and ahead.weight()[0].abs().sum() > 0, "it came before its owner ended"
    with pytest.raises(rtp_ext.RotationError, match="from rank 1"):  # control: nobody asked for it in time
        late.weight()
    for execution in (ahead, late):
        assert execution.next() is None
    ring.close()


@on_ranks(2, lost=[1])
def test_a_rank_that_was_stopped_is_a_timeout_over_tcp(rank):
    model = rtp_ext.rotate_for_inference(make_model(), transport="tcp", timeout=1.0)
    pids = rtp_ext.ring_of(model).exchange(os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while Path(f"/proc/{pids[1]}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)
    with torch.no_grad(), pytest.raises(rtp_ext.RingTimeout, match=r"from rank 1 of .* nothing arrived for 1 s"):
        logits(model, "small", rank, 0)
    rtp_ext.ring_of(model).close()
