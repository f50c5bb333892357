"""Shards are pulled ahead across layers: bytes, wrong guesses, new weights, threads."""

import copy
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from hf_models import make
from reference import assert_same, differs, random
from torch import nn

import rtp_ext

LAYERS = 4


class Layers(nn.Module):
    """Linear layers whose order the caller chooses; `fails` raises before the last one."""

    def __init__(self) -> None:
        super().__init__()
        square = [nn.Linear(12, 12, dtype=torch.float64) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(square)
        for number, parameter in enumerate(self.parameters()):
            parameter.data.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))

    def forward(self, x: torch.Tensor, order=tuple(range(LAYERS)), fails=False) -> torch.Tensor:
        for place, number in enumerate(order):
            if fails and place == LAYERS - 1:
                raise RuntimeError("the caller's own error")
            x = torch.tanh(self.layers[number](x))
        return x


class Choosing(nn.Module):
    """Experts between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = next(
            part for part in make("mixtral").modules() if type(part).__name__ == "MixtralExperts"
        ).eval()
        self.first = nn.Linear(self.experts.hidden_dim, self.experts.hidden_dim)
        self.last = nn.Linear(self.experts.hidden_dim, 3)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        index, weights = torch.full((len(x), 1), expert), torch.ones(len(x), 1)
        return self.last(self.experts(self.first(x), index, weights))


def foreign_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() - p.to_local().nbytes for p in model.parameters())


def status(key: str) -> int:
    """A number of this process that the kernel counts."""
    return int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0])


@on_ranks([2, 3])
def test_pulls_ahead(rank, ranks, cases):
    plain = Layers()
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport="tcp", timeout=60.0)
    ring = rtp_ext.ring_of(model)
    once = foreign_bytes(model)
    x = random(3 + rank, 12, dtype=torch.float64, seed=rank)

    def forward(expected=None, **options):
        """The bytes of a forward, and the first shards that were pulled ahead of their layer, and used by it."""
        before, (begun, used) = ring.pulled_bytes, ring.prefetched()
        with torch.no_grad():
            assert_same(model(x, **options), plain(x, **options), 1e-12, "values")
            assert differs(model(x, **options), plain(x + 1, **options), 1e-6), "control"
        now = ring.prefetched()
        return (ring.pulled_bytes - before) / 2, ((now[0] - begun) / 2, (now[1] - used) / 2)

    with cases.case("bytes of right guesses"):
        forward()
        assert forward() == (once, (LAYERS - 1, LAYERS - 1))
        assert ring.slot_count("weight").peak_slots == 2
    with cases.case("another order"):
        back = tuple(reversed(range(LAYERS)))
        before, (begun, used) = ring.pulled_bytes, ring.prefetched()
        with torch.no_grad():
            assert_same(model(x, back), plain(x, back), 1e-12, "values")
        shard = max(p.numel() * p.element_size() for p in plain.layers[0].parameters())
        assert once <= ring.pulled_bytes - before <= once + shard, "one wrong guess at most"
        assert ring.prefetched() == (begun, used), "the first layer differs already: nothing is expected after it"
        assert forward(order=back) == (once, (LAYERS - 1, LAYERS - 1)), "learned"
        swapped = (3, 2, 0, 1)
        with torch.no_grad():
            assert_same(model(x, swapped), plain(x, swapped), 1e-12, "values")
        (begun_now, used_now) = ring.prefetched()
        assert (begun_now - begun, used_now - used) == (2 * (LAYERS - 1) + 2, 2 * (LAYERS - 1) + 1), "one wrong guess"
        assert ring.pulled_bytes - before <= 4 * once + 2 * shard
    with cases.case("new weights after a forward that failed with a shard pulled ahead"):
        forward()
        begun, used = ring.prefetched()
        with pytest.raises(RuntimeError, match="the caller's own error"), torch.no_grad():
            model(x, fails=True)
        assert ring.prefetched() == (begun + LAYERS - 1, used + LAYERS - 2), "the last layer's shard came in vain"
        old = plain(x)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(0.5)
        rtp_ext.update_weights(model, plain.named_parameters())
        forward()
        assert differs(old, plain(x), 1e-6), "control: the weights have changed"
    with cases.case("the last layer alone, after its owner wrote to it"):
        with pytest.raises(RuntimeError, match="the caller's own error"), torch.no_grad():
            model(x, fails=True)
        dist.barrier()
        with torch.no_grad():
            for parameter in (*plain.parameters(), *(p.to_local() for p in model.parameters())):
                parameter.add_(0.25)
        dist.barrier()
        with torch.no_grad():
            assert_same(model.layers[-1](x), plain.layers[-1](x), 1e-12, "a part alone")
        forward()
    with cases.case("threads"):
        outputs, errors = {}, []
        inputs = {(t, n): random(2 + t, 12, dtype=torch.float64, seed=10 * t + n) for t in range(3) for n in range(6)}

        def work(thread):
            try:
                with torch.no_grad():
                    for number in range(6):
                        outputs[thread, number] = model(inputs[thread, number])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        for key, y in outputs.items():
            with torch.no_grad():
                assert_same(y, plain(inputs[key]), 1e-12, f"thread {key}")
        assert len(outputs) == 18
        forward()
        assert forward() == (once, (LAYERS - 1, LAYERS - 1)), "afterwards"
    with cases.case("experts between linear layers"):
        torch.manual_seed(0)
        block = Choosing()
        chooses = rtp_ext.rotate_for_inference(copy.deepcopy(block), transport="tcp", timeout=60.0)
        dense = foreign_bytes(chooses.first) + foreign_bytes(chooses.last)
        each = -(-block.experts.num_experts // ranks)
        y = random(4, block.experts.hidden_dim, dtype=torch.float32, seed=rank)
        for expert, most in ((each * rank, 0), (each * rank, 0), (each * ((rank + 1) % ranks), foreign_bytes(chooses))):
            before = rtp_ext.ring_of(chooses).pulled_bytes
            with torch.no_grad():
                assert_same(chooses(y, expert), block(y, expert), 1e-5, f"expert {expert}")
            pulled = rtp_ext.ring_of(chooses).pulled_bytes - before
            assert pulled == dense if most == 0 else dense < pulled <= most, f"{pulled} bytes, linear layers {dense}"
        dist.barrier()
        rtp_ext.ring_of(chooses).close()
    with cases.case("strangers start no threads, few of them stay, and ranks come in beside them"):
        host, port, *_ = ring._source.address().split()
        before = status("Threads")
        strangers = [socket.create_connection((host, int(port))) for _ in range(64 + 3 * ranks + 9)]
        strangers[0].settimeout(20.0)
        assert strangers[0].recv(1) == b"", "the oldest one has to go"
        assert status("Threads") == before
        late = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport="tcp", timeout=60.0)
        with torch.no_grad():
            assert_same(late(x), plain(x), 1e-12, "beside strangers")
        dist.barrier()
        for each in (*strangers, rtp_ext.ring_of(late)):
            each.close()
    dist.barrier()
    with cases.case("closed in a forward of another thread"):

        def forwards():
            try:
                with torch.no_grad():
                    while True:
                        model(x)
            except BaseException as error:
                errors.append(error)

        other = threading.Thread(target=forwards)
        other.start()
        time.sleep(0.05)
        dist.barrier()
        ring.close()
        other.join(20.0)
        assert [type(error) for error in errors] == [rtp_ext.RotationError], errors
        with torch.no_grad(), pytest.raises(rtp_ext.RotationError, match="it was closed"):
            model(x)
