"""Forward-only models on several hosts with several ranks each: mapped inside, pulled once for a host between."""

import copy
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_ranks
from models import make_model
from pretended_hosts import pretend_hosts
from reference import assert_same, differs, random
from torch import nn

import rtp_ext
from rtp_ext._native import make_schedule

HOSTS = 2


def test_order():
    """Ranks of a host take their own shards in turn, and need those of other hosts in the same steps."""
    for hosts, per_host in ((2, 2), (3, 2), (2, 3)):
        ranks = hosts * per_host
        for host in range(hosts):
            here = range(host * per_host, (host + 1) * per_host)
            orders = [
                [step.owner for step in make_schedule(ranks, rank, pass_="forward", sourced=True, hosts=hosts).steps]
                for rank in here
            ]
            for rank, order in zip(here, orders, strict=True):
                assert order[0] == rank and sorted(order) == list(range(ranks))
                assert order[::hosts] == [here[0] + (rank - here[0] - s) % per_host for s in range(per_host)]
            for step in range(ranks):
                assert len({order[step] for order in orders}) == (per_host if step % hosts == 0 else 1)


class Together(nn.Module):
    """Layers that all ranks of the ring begin together: ranks of a host are near each other in time."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(layers))
        for number, parameter in enumerate(self.parameters()):
            parameter.data.copy_(random(*parameter.shape, dtype=torch.float64, seed=number) / width)
        self.before = lambda number: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            self.before(number)
            x = x + layer(x)
        return x


def interrupted(model: Together, x: torch.Tensor, again: bool = True) -> None:
    """The first rank of each host runs a forward that KeyboardInterrupt ends, for which torch calls no hook, and
    another one if `again`."""
    if dist.get_rank() % 2 == 0:
        before = model.before
        model.before = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.before = lambda number: None
        if again:
            model(x)
        model.before = before


def interrupt(number: int) -> None:
    if number == 2:
        raise KeyboardInterrupt


def loads_after_an_interrupt(model: Together, plain: Together, x: torch.Tensor) -> None:
    """The mate of a rank that an interrupt has hit, and that runs no further forward, copies no old shard from it."""
    for loads in (False, True):
        dist.barrier()
        interrupted(model, x, again=False)
        dist.barrier()
        values = {name: 1.5 * p for name, p in plain.state_dict().items()}
        plain.load_state_dict(values)
        if loads:
            model.load_state_dict(values)
        else:  # which nothing notices
            for parameter in model.parameters():
                parameter.to_local().mul_(1.5)
        dist.barrier()
        if dist.get_rank() % 2:
            before, model.before = model.before, lambda number: None
            assert loads or differs(model(x), plain(x), 1e-3), "control: old shards are there to copy"
            assert not loads or not differs(model(x), plain(x), 1e-12), "load_state_dict ends the forward"
            model.before = before
    dist.barrier()
    assert_same(model(x), plain(x), 1e-12, "all ranks")


@torch.no_grad()
def shares(rank, ranks):
    pretend_hosts(rank, ranks // HOSTS)
    plain = make_model()
    ids = torch.arange(3 + rank).unsqueeze(0)
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=60.0)
    ring = rtp_ext.ring_of(model)
    assert ring.transport == "shm+tcp" and ring.slot_count("weight").slots == 0, ring
    for _ in range(1 + rank % 2):
        assert_same(model(ids), plain(ids), 1e-12, "values")
    assert differs(model(ids), plain(ids + 1), 1e-6), "control"
    assert ring.slot_count("weight").peak_slots == 2
    ring.exchange("no rank pulls any more")
    ring.close()
    plain = Together(6, 64)
    x = random(3 + rank, 64, dtype=torch.float64, seed=rank)
    counts = {}
    for transport in ("shm+tcp", "tcp"):
        model = copy.deepcopy(plain)
        model.before = lambda number: dist.barrier()
        model = rtp_ext.rotate_for_inference(model, transport=transport, timeout=60.0)
        ring = rtp_ext.ring_of(model)
        for step in range(3):
            assert_same(model(x), plain(x), 1e-12, f"forward {step} over {transport}")
        begun, used = ring.prefetched()
        assert begun == used == 2 * (len(plain.layers) - 1), "the order is known from the first forward"
        counts[transport] = ring.pulled_bytes, ring.shared_bytes
        plan = rtp_ext.explain(model)
        assert 3 * plan.totals["forward_bytes"] == sum(counts[transport]), "the shards that lie here are not pulled"
        assert ("reads those of its own host" in str(plan).replace("\n", " ")) == (transport == "shm+tcp")
        if transport == "shm+tcp":
            interrupted(model, x)
            dist.barrier()  # no rank is in a forward
            for parameter in (*plain.parameters(), *(p.to_local() for p in model.parameters())):
                parameter.mul_(1.5)
            dist.barrier()  # all have written
            if rank % 2:
                model.before = lambda number: None
                assert_same(model(x), plain(x), 1e-12, "no old shard is copied from a mate that an interrupt has hit")
                model.before = lambda number: dist.barrier()
            dist.barrier()
            assert_same(model(x), plain(x), 1e-12, "no old shard is copied after a write")
            loads_after_an_interrupt(model, plain, x)
            rtp_ext.update_weights(model, ((n, p * 2) for n, p in plain.named_parameters()))
            for parameter in plain.parameters():
                parameter.mul_(2)
            assert_same(model(x), plain(x), 1e-12, "nor after an update")
        dist.barrier()
        ring.close()
    return 3 * sum(p.nbytes for p in plain.parameters()), counts


def test_a_host_pulls_once():
    ranks = 2 * HOSTS
    results = run_ranks(shares, ranks)
    whole = results[0][0]
    once = whole // HOSTS  # bytes of the other host's shards, in three forwards
    for host in range(HOSTS):
        mates = [counts for _, counts in results[host * 2 : host * 2 + 2]]
        for counts in mates:
            pulled, shared = counts["shm+tcp"]
            assert pulled + shared == counts["tcp"][0] - whole // ranks, "each rank got every shard once"
        between = sum(counts["shm+tcp"][0] for counts in mates)
        print(f"host {host}: {between} bytes from the other host for two ranks, which need {once} each")
        assert once <= between <= 1.5 * once, "mostly once for both; a rank that is late pulls again"
        assert counts["tcp"][1] == 0, "control: over tcp nothing is shared"


@on_ranks(2 * HOSTS)
def test_a_mate_that_sleeps_stops_nobody(rank, ranks):
    """Rank 1 is stopped in the middle of a forward, while it pulls; its mate goes on."""
    pretend_hosts(rank, ranks // HOSTS)
    plain = Together(4, 32)
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=60.0)
    ring = rtp_ext.ring_of(model)
    assert ring.transport == "shm+tcp"
    pids = ring.exchange(os.getpid())
    store = dist.distributed_c10d._get_default_store()
    x = random(2, 32, dtype=torch.float64, seed=0)
    state = lambda pid: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]  # noqa: E731
    with torch.no_grad():
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)  # an owner on the other host: pulls from it hang
        if rank == 1:
            while state(pids[2]) != "T":
                time.sleep(0.01)
            store.set("rank 1 begins", "")
            model(x)  # it claims the shard of rank 2, and hangs
        if rank == 0:
            store.wait(["rank 1 begins"])
            time.sleep(0.5)
            os.kill(pids[1], signal.SIGSTOP)
            while state(pids[1]) != "T":
                time.sleep(0.01)
            os.kill(pids[2], signal.SIGCONT)
            start = time.monotonic()
            for _ in range(2):
                assert_same(model(x), plain(x), 1e-12, "values")
            assert time.monotonic() - start < 20.0
            shard = sum(p.to_local().nbytes for p in model.layers[0].parameters())
            assert ring.pulled_bytes > 0 and ring.shared_bytes in (0, shard), (
                ring.pulled_bytes,
                ring.shared_bytes,
                shard,
            )
            assert state(pids[1]) == "T", "control: the mate slept"
            os.kill(pids[1], signal.SIGCONT)
    dist.barrier()
    with torch.no_grad():
        assert_same(model(x), plain(x), 1e-12, "afterwards")
    dist.barrier()
    ring.close()


@on_ranks(2 * HOSTS, lost=[1])
def test_an_owner_that_died(rank, ranks):
    """An owner of another host that dies is an error that names it; mates inside a host stay."""
    pretend_hosts(rank, ranks // HOSTS)
    plain = Together(3, 32)
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=5.0)
    pids = rtp_ext.ring_of(model).exchange(os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while Path(f"/proc/{pids[1]}").exists() and Path(f"/proc/{pids[1]}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    x = random(2, 32, dtype=torch.float64, seed=0)
    with torch.no_grad():
        if rank == 0:
            assert_same(model(x), plain(x), 1e-12, "its memory stays mapped")
        else:
            with pytest.raises(rtp_ext.RotationError, match="from rank 1 of the ring"):
                model(x)
    with pytest.raises(rtp_ext.RotationError, match="rank 1"):
        rtp_ext.update_weights(model, plain.named_parameters())
    rtp_ext.ring_of(model).close() if rank else time.sleep(1.0)


@on_ranks(6)
@torch.no_grad()
def test_blocks_on_three_hosts_in_threads(rank, ranks):
    """Two threads of each rank, on three hosts, with weights in blocks; a group of the second layer has 32 rows."""
    pretend_hosts(rank, ranks // 3)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 66), nn.Linear(66, 64, bias=False), nn.Linear(64, 7))
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), weights="nf4", timeout=60.0)
    ring, twin = rtp_ext.ring_of(model), copy.deepcopy(plain)
    assert (ring.transport, ring.hosts) == ("shm+tcp", 3)
    twin.load_state_dict(rtp_ext.frozen_weights(model), strict=False)
    inputs = [random(3 + number, 64, dtype=torch.float32, seed=10 * rank + number) for number in range(8)]
    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(torch.no_grad()(model), inputs))
    for x, y in zip(inputs, outputs, strict=True):
        assert_same(y, twin(x), 1e-5, "values")
        assert differs(y, plain(x), 1e-3), "control: they are rounded"
    assert ring.pulled_bytes + ring.shared_bytes > 0, "control: shards of other hosts have come"
    dist.barrier()
    ring.close()
