"""What travels beside what where experts are divided, by the traces of both rings and the times of the exchanges of
tokens; and for what the host waits."""

import dataclasses
import time
from collections import Counter

import torch
from harness import on_ranks
from reference import random
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from rtp_ext import Ring, RotationDims
from rtp_ext.functional import dispatch
from rtp_ext.functional import experts as functional_experts
from rtp_ext.nn import RotatedExperts, RotatedLinear

D, H, E, LAYERS, TOKENS = 16, 8, 8, 3, 6
DIMS = RotationDims(ring="ring", expert="expert")


def model_of(ring):
    """Layers of a linear layer and experts, which are layers 0 to 2 of the ring's and of the experts' passes."""
    options = {"dtype": torch.float64, "ring": ring}
    return [(RotatedLinear(D, D, **options), RotatedExperts(E, D, H, **options)) for _ in range(LAYERS)]


def run(ring, layers, seed):
    y = x = random(TOKENS, D, dtype=torch.float64, seed=seed).requires_grad_()
    weights = random(TOKENS, 2, dtype=torch.float64, seed=seed + 1)
    index = torch.rand(TOKENS, E, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :2]
    ring.begin_forward()  # as the forward of a converted model does
    for dense, experts in layers:
        y = y + experts(dense(y), index, weights)
    ring.end_forward()
    y.square().sum().backward()
    return x.grad


def timed_exchanges(experts):
    """Returns a list that gets the time at which each exchange of tokens begins: four of a layer in forward (sizes,
    rows, numbers of experts, outputs), two in backward."""
    begun, plain = [], experts.all_to_all

    def timed(*given, **options):
        begun.append(time.monotonic())
        return plain(*given, **options)

    experts.all_to_all = timed
    return begun


def first_posted(trace):
    """Returns for each pass when its first shard was sent."""
    hops = [[] for _ in trace.passes]
    for event in trace.events:
        if (event.lane, event.kind) == ("weight", "step"):
            hops[event.pass_].append(trace.zero + event.posted)
    return [min(each) for each in hops]


@on_ranks(4)
def test_shards_travel_while_tokens_do(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "expert"))
    for prefetch in (True, False):
        with cases.case(f"prefetch {prefetch}"), Ring(mesh, dims=DIMS, timeout=30, prefetch=prefetch) as ring:
            layers = model_of(ring)
            for step in range(3):
                run(ring, layers, step)
            begun = timed_exchanges(ring.experts)
            with ring.trace() as whole, ring.experts.inner.trace() as part:
                run(ring, layers, 7)
            dense, experts = first_posted(whole), first_posted(part)
            assert len(dense) == len(experts) == 2 * LAYERS and len(begun) == 6 * LAYERS
            forward = [begun[4 * layer : 4 * layer + 4] for layer in range(LAYERS)]
            backward = [begun[4 * LAYERS + 2 * layer :][:2] for layer in range(LAYERS)]  # the last layer first
            ahead = {
                # Shards of experts are under way while their tokens are: all but the first of a step.
                "dispatch": [experts[layer] < forward[layer][0] for layer in range(LAYERS)],
                "gradients of outputs": [experts[LAYERS + place] < backward[place][0] for place in range(LAYERS)],
                # Those of the next linear layer, while the tokens of this one travel both ways.
                "next layer": [dense[layer + 1] < forward[layer][0] for layer in range(LAYERS - 1)],
                "next layer in backward": [dense[LAYERS + place] < backward[place][0] for place in range(1, LAYERS)],
                # The first of a backward, before the last combine of the forward.
                "turn": [dense[LAYERS] < forward[-1][3]],
            }
            expected = {name: [prefetch] * len(found) for name, found in ahead.items()}
            expected["dispatch"][0] = False
            assert ahead == expected
            sent, used = ring.experts.inner.prefetched()
            assert sent == used and (sent > 0) == prefetch


class Reads(TorchFunctionMode):
    """Counts the reads of values by the host, for which it waits on a GPU."""

    NAMES = (
        *("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__", "cpu", "numpy", "equal"),
        *("nonzero", "bincount", "masked_select", "unique", "repeat_interleave", "allclose"),
    )

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = getattr(function, "__name__", str(function))
        masks = name == "__getitem__" and getattr(arguments[1], "dtype", None) == torch.bool
        if name in self.NAMES or masks:
            self.found[name] += 1
        return function(*arguments, **(keywords or {}))


@on_ranks(4)
def test_the_host_reads_once_in_a_layer(rank, ranks):
    functional_experts._expect_choices = lambda *_: None  # reads on CPUs alone
    for capacity in (None, 3):
        dims = dataclasses.replace(DIMS, expert_capacity=capacity)
        with Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "expert")), dims=dims, timeout=30) as ring:
            layers = model_of(ring)
            run(ring, layers, 0)
            dispatch._compares_on_host = lambda experts: experts.capacity is None  # as on GPUs
            with Reads() as reads:
                run(ring, layers, 1)
            assert reads.found == ({} if capacity else {"tolist": LAYERS}), "numbers of rows, in forward"
