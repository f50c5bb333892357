"""What the exchanges of rtp_ext.optim.Muon send, who iterates, and what a rank allocates."""

import re

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks
from hf_models import make
from live_bytes import LiveBytes
from muon_cases import Pair, Shape
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rtp_ext
from rtp_ext.optim import Muon, matrices
from rtp_ext.optim.newton_schulz import pack_triangle, triangle_numel, unpack_triangle
from rtp_ext.ring import Ring
from rtp_ext.ring.links.communicator import Communicator

FOUR = torch.float32.itemsize


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 16, 31])
def test_a_triangle_holds_a_symmetric_matrix_once(n):
    matrix = torch.arange(n * n, dtype=torch.float64).view(n, n)
    matrix = matrix + matrix.T
    packed = torch.full((triangle_numel(n),), -1.0, dtype=torch.float64)
    pack_triangle(matrix, packed)
    rows, columns = torch.triu_indices(n, n)
    assert torch.equal(packed.sort().values, matrix[rows, columns].sort().values)
    assert torch.equal(unpack_triangle(packed, n), matrix)


def gram_bytes(shape, ranks):
    """By the closed form: on average over the ranks, in a step."""
    return min(shape) * (min(shape) + 1) * (ranks - 1) / ranks * FOUR


def whole_bytes(shape, ranks):
    return 2 * shape[0] * shape[1] * (ranks - 1) / ranks**2 * FOUR


class Sent:
    """Bytes of the collectives of a rank that are sent to other ranks, by operation."""

    def __enter__(self):
        self.calls, self.stock = [], Communicator.collectively

        def collectively(communicator, operation, post, *tensors, group, **options):
            if getattr(post, "func", None) is dist.all_to_all_single:
                sent, leaving = tensors[1], post.keywords["input_split_sizes"]
                assert sent.dtype == torch.uint8 and sum(leaving) == sent.numel() and leaving[communicator.rank] == 0
                self.calls.append((operation, sent.numel()))
            else:
                self.calls.append((operation, tensors[-1].nbytes * (communicator.size - 1)))
            return self.stock(communicator, operation, post, *tensors, group=group, **options)

        Communicator.collectively = collectively
        return self

    def __exit__(self, *_):
        Communicator.collectively = self.stock

    def of(self, operation):
        return [count for name, count in self.calls if name == operation]


def sent_cases(ranks, cases, ring):
    tall, wide = Shape((96, 24), 0), Shape((24, 120), 1)
    for exchange, closed, shapes in (
        ("gram", gram_bytes, [tall, wide] * ranks),
        ("whole", whole_bytes, [tall, wide] * ranks),
        ("whole", whole_bytes, [Shape((96, 24), 1), Shape((48, 48), 0)] * ranks),  # not cut along the long side
    ):
        for _ in range(2):
            with cases.case(f"{exchange} of {shapes[0]}"):
                pair = Pair(ring, shapes, exchange=exchange, lr=0.1)
                pair.take_steps(1)
                before = pair.optimizer.bytes_sent()
                with Sent() as wire:
                    pair.take_steps(1)
                own = pair.optimizer.bytes_sent() - before
                calls = wire.of("all_to_all of Muon")
                assert len(calls) == 2, "one exchange there and one back for all matrices"
                assert own <= sum(calls) <= 1.02 * own, "but for padding"
                assert sum(wire.of("exchange")) <= 1024 * (ranks - 1), "the comparison of ranks"
                (planned,) = pair.optimizer.plan().bytes_sent()
                assert planned[ring.rank] == own
                mean = sum(ring.exchange(sum(calls))) / ranks
                expected = sum(closed(each.shape, ranks) for each in shapes)
                assert abs(mean / expected - 1) < 0.05, f"{mean} bytes, expected {expected}"
    with cases.case("short sides are cut: whole, also where gram was asked for"):
        plan = Pair(ring, [Shape((96, 24), 1), tall], exchange="gram").optimizer.plan()
        assert [row.exchange for row in plan.rows] == ["whole", "gram"]
        assert re.search(r"^params\[0\] of group 1 +1/1 +96x24 +gram +\d+ +\d+$", str(plan), re.MULTILINE)
    with cases.case("auto"):
        shapes = [
            Shape((48, 48)),
            Shape((48 * 8, 48)),
            Shape((48, 64), 1),
            Shape((2 * ranks, 8, 4)),
            Shape((9, 8), None),
        ]
        found = [row.exchange for row in Pair(ring, shapes).optimizer.plan().rows]
        assert found[:2] == ["whole", "gram"]
        assert found[2] == ("gram" if ranks == 2 else "whole"), "fewer bytes for R > 2 a, a = 4 / 3"
        assert found[3:] == ["local"] * (2 * ranks + 1)
    with cases.case("rank 0 has nothing to send for what each rank has whole"):
        pair = Pair(ring, shapes[3:], lr=0.1)
        with Sent() as wire:
            pair.take_steps(1)
        assert wire.of("all_to_all of Muon") == [] and pair.optimizer.bytes_sent() == 0


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = (leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.elements = max(self.elements, *(size // FOUR for size in sizes), 0)
        return result


def memory_cases(ranks, cases, ring):
    """One matrix that dominates: its Gram matrix has an eighth of its size."""
    shape, whole = (512, 64), 512 * 64
    for exchange in ("gram", "whole"):
        with cases.case(f"memory of {exchange}"):
            pair = Pair(ring, [Shape(shape)], exchange=exchange, lr=0.1)
            pair.gradients()
            pair.optimizer.step()
            with Largest() as largest, LiveBytes() as live:
                pair.optimizer.step()
            most, peak = (max(ring.exchange(each)) for each in (largest.elements, live.peak / FOUR))
            if exchange == "gram":
                # a part, its product with Q, and triangles of all ranks and a few matrices of 64 x 64
                assert most == whole // ranks and peak < 2.2 * whole / ranks + (ranks / 2 + 6) * 64 * 64
            else:
                assert most >= whole and peak > 2 * whole, "control: the owner has it whole"


def llama_cases(ranks, cases):
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = make("llama", **sizes)
    rtp_ext.fully_rotate(model, timeout=30.0)
    hidden, rest = matrices(model)
    with cases.case("owners of a Llama of four layers have equal work"):
        assert len(hidden) == 28 and {tuple(p.shape) for p in rest} == {(53, 32), (32,)}
        for exchange in ("auto", "gram", "whole"):
            plan = Muon(hidden, exchange=exchange).plan()
            work = plan.plans[0].owner_flops()
            assert max(work) <= 1.15 * sum(work) / ranks, f"{exchange}: {work}"
            assert {row.owner for row in plan.rows} == {*range(ranks)}
    with cases.case("bundles are cut along the long side"):
        named = [(name, p) for name, p in model.named_parameters() if any(p is each for each in hidden)]
        plan = Muon(named, exchange="gram").plan()
        found = {row.parameter.rsplit(".", 2)[-2]: row.exchange for row in plan.rows}
        assert found == {
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "q_proj", "o_proj"), "gram"),
            **dict.fromkeys(("k_proj", "v_proj"), "whole"),  # half as many rows as columns
        }
    rtp_ext.ring_of(model).close()


@on_ranks(few([4], [2, 4]))
def test_bytes_owners_and_memory(ranks, cases):
    with Ring() as ring:
        sent_cases(ranks, cases, ring)
        memory_cases(ranks, cases, ring)
    llama_cases(ranks, cases)
