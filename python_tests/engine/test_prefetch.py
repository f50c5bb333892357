"""Shards of the next layers are sent while this one computes: this saves time and never changes a result."""

import copy

import pytest
import torch
from grids import few
from harness import Cases, on_ranks, run_ranks
from models import batch_loss, make_model, mean_loss, train
from reference import assert_same, differs, full
from torch import nn

import rtp_ext
from rtp_ext import _native

TOLERANCE = 1e-9
STEPS = 3


class Wandering(nn.Module):
    """Two layers whose order changes from step to step, and one that is skipped at times."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.step = 0

    def forward(self, x):
        order = [[0, 1, 2], [0, 1, 2], [0, 2, 1], [1, 2], [0, 1, 2], [0, 1, 2, 0]][self.step]
        self.step += 1
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def _scale(layer):
    """A function of its own: a module whose forward names the weight of another one gathers it."""
    with torch.no_grad():
        layer.weight.mul_(1.25)


class Restless(nn.Module):
    """Writes the second layer's weight in every forward, after the first hop of that layer may have left."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        _scale(self.second)
        return self.third(self.second(x))


def _input(step, features):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, features, generator=generator, dtype=torch.float64)


def _compare(model, rank, transport, steps, features):
    """Trains on one batch for all ranks, whose average is that of the plain model: outputs and parameters are the same.

    Returns the hops that were sent ahead, and those that were used.
    """
    plain = model.double()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), transport=transport, bundle=False, timeout=60.0)
    ring = rtp_ext.ring_of(model)
    for step in range(steps):
        x = _input(step, features)
        outputs = [module(x) for module in (model, plain)]
        assert_same(*outputs, TOLERANCE, f"output of step {step}")
        for module, y in zip((model, plain), outputs, strict=True):
            y.square().sum().backward()
            for parameter in module.parameters():
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter.sub_(parameter.grad, alpha=0.01)
                    parameter.grad = None
    for name, parameter in plain.named_parameters():
        assert_same(full(model.get_parameter(name)), parameter, TOLERANCE, name)
    counts = ring.prefetched()
    ring.close()
    return counts


def _trains(rank, ranks):
    cases, seen = Cases(), {}
    plain = make_model()
    train(plain, lambda step: mean_loss(plain, ranks, step), STEPS)
    for transport in ("shm", "c10d"):
        torch.manual_seed(0)
        for ahead in ("auto", "lean", 2000, False) if transport == "shm" else ("auto", "lean", False):
            options = {"buffers": ahead} if ahead else {"prefetch": False}
            for in_place in (False, True):
                ring = rtp_ext.Ring(transport=transport, in_place=in_place, timeout=60.0, **options)
                model = rtp_ext.fully_rotate(make_model(), mesh=ring)
                train(model, lambda step, model=model: batch_loss(model, rank, step), STEPS)
                with cases.case(f"{transport}, ahead {ahead}, in_place {in_place}"):
                    for name, parameter in plain.named_parameters():
                        assert_same(full(model.get_parameter(name)), parameter, TOLERANCE, name)
                    seen[transport, ahead, in_place] = ring.prefetched()
                    assert ring.slot_count("weight").peak_slots <= 2 or ahead not in (False, "lean")
                model.eval()
                with torch.no_grad():
                    again = [batch_loss(model, rank, 0).item() for _ in range(3)]
                assert len(set(again)) == 1
                ring.close()
        with cases.case(f"a changing order, {transport}"):
            seen[transport, "wandering"] = _compare(Wandering(), rank, transport, 6, 7)
        with cases.case(f"written weights, {transport}"):
            seen[transport, "restless"] = _compare(Restless(), rank, transport, 4, 6)
    cases.finish()
    return seen


@pytest.mark.parametrize("ranks", few([3], [2, 3]))
def test_the_plain_models_results(ranks):
    for seen in run_ranks(_trains, ranks):
        for (transport, *case), (sent, used) in seen.items():
            if case[0] == "wandering":
                assert 0 < used < sent, f"{transport}: expected some hops sent in vain, got {used} of {sent} used"
            elif case[0] == "restless":
                assert 0 < used < sent, f"{transport}: expected those of the second layer in vain, got {used} of {sent}"
            elif case[0] is False or (case[1] and transport == "c10d"):
                assert sent == 0, f"{transport} {case}: expected none, got {sent}"
            else:
                # From the second step on: between the 6 rotated layers of a forward and those of a backward
                assert sent == used > 0, f"{transport} {case}: expected all to be used, got {used} of {sent}"


def test_every_layer_but_the_first_of_a_phase():
    layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    ring = rtp_ext.Ring.emulated(4, buffers="lean")
    model = nn.Sequential(*layers)
    rtp_ext.fully_rotate(model, mesh=ring, bundle=False)
    x = torch.randn(3, 8, requires_grad=True)
    outputs = []
    for step in range(3):
        ring.reset_peak()
        outputs.append(model(x))
        outputs[-1].sum().backward()
        assert ring.prefetched() == (2 * 3 * step, 2 * 3 * step)
        assert ring.slot_count("weight").peak_slots == 2
    assert torch.equal(outputs[0], outputs[2])
    quiet = rtp_ext.Ring.emulated(4, prefetch=False)
    twin = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    rtp_ext.fully_rotate(twin, mesh=quiet, bundle=False)
    for _ in range(2):
        twin(x).sum().backward()
    assert quiet.prefetched() == (0, 0)


def _layers(**options):
    """Four layers of 4 shards of 64 bytes."""
    ring = rtp_ext.Ring.emulated(4, route="direct", **options)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    return ring, rtp_ext.fully_rotate(nn.Sequential(*layers), mesh=ring, bundle=False)


def test_whole_layers_ahead_and_into_the_backward():
    (ring, model), (one, twin) = _layers(), _layers(buffers="lean")
    x = torch.randn(3, 8, requires_grad=True)
    size = _native.footprint(
        [_native.OperationFacts("linear", [_native.ParameterFacts((8, 8))])] * 4,
        **dict(ranks=4, in_place=False, sends_anywhere=True, receives_anywhere=True, cast=False, look_ahead=None),
        **dict(compute_bytes=4, reduce_bytes=4, slot_cap=0, route="direct"),
    )
    for step in range(4):
        ring.reset_peak()
        results = []
        for each in (model, twin):
            each.zero_grad()
            y = each(x)
            y.square().sum().backward()
            results.append([y, *(full(parameter.grad) for parameter in each.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        # from the second step on every hop of every layer but the first one of the forward
        assert ring.prefetched() == (3 * 7 * step, 3 * 7 * step) and one.prefetched() == (6 * step, 6 * step)
        assert ring.slot_count("weight").peak_slots == (4 if step else 2), "one in use, three ahead"
    assert ring.slot_count("weight").bytes == size.weight.bytes == 4 * 64
    with torch.no_grad():
        for _ in range(3):  # other passes than those of a forward that is followed by a backward
            model(x)
    sent, used = ring.prefetched()
    assert sent == used == 3 * (7 * 3 + 2 * 3)
    for step in range(2):
        model(x).sum().backward()
        assert ring.prefetched() == (sent + 3 * (3 + 7 * step), used + 3 * (3 + 7 * step))
    for _ in range(2):  # a forward whose backward does not follow: its first hops are in vain, once
        y = model(x)
    y.sum().backward()
    assert ring.prefetched() == (sent + 3 * (10 + 3 * 3 + 1), used + 3 * (10 + 3 * 3))


def _ahead(events):
    """The pass of each product, and the passes of the shards that have been posted before it and that neither it nor an
    earlier product takes."""
    owner = {"weight": lambda label: label.split("W")[2].split(" ")[0], "compute": lambda label: label.split("W")[1]}
    hops = [(each.posted, (each.pass_, owner["weight"](each.label))) for each in events if each.lane == "weight"]
    products = [each for each in events if (each.kind, each.lane) == ("step", "compute") and " W" in each.label]
    taken = set()
    for product in sorted(products, key=lambda event: event.start):
        taken.add((product.pass_, owner["compute"](product.label)))
        posted = [shard for time, shard in hops if time <= product.start]
        yield product.pass_, [number for number, owner in posted if (number, owner) not in taken]


@pytest.mark.parametrize("route", ["direct", "ring"])
def test_the_look_ahead_in_bytes(route):
    """Counted from traces of a forward and a backward of 6 layers: three shards of 64 bytes of each travel."""
    most = {}
    for buffers in ("auto", "lean", 64, 130, 5 * 64, 9 * 64 + 63):
        ring = rtp_ext.Ring.emulated(4, route=route, buffers=buffers)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
        rtp_ext.fully_rotate(model, mesh=ring, bundle=False)
        x = torch.randn(3, 8, requires_grad=True)
        for _ in range(3):
            model(x).sum().backward()
        with ring.trace() as trace:
            model(x).sum().backward()
        ahead = list(_ahead(trace.events))
        assert len(ahead) == 6 * 4 * 2
        assert all(passes == sorted(passes) for _, passes in ahead), "in the order of use"
        most[buffers] = max(len(passes) for _, passes in ahead), max(len({*passes} - {now}) for now, passes in ahead)
        sent, used = ring.prefetched()
        assert sent == used
    assert most == {"auto": (3, 1), "lean": (1, 1), 64: (1, 1), 130: (2, 1), 320: (5, 2), 639: (9, 3)}


def test_hops_into_a_backward():
    """Three slots only once eight forwards in a row had a backward, and then until one has none."""
    ring = rtp_ext.Ring.emulated(2)
    model = rtp_ext.fully_rotate(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), mesh=ring, bundle=False)
    x = torch.randn(3, 8, requires_grad=True)

    def across():
        """The most shards of the backward that were posted before a product of the forward."""
        with ring.trace() as trace:
            model(x).sum().backward()
        ahead = list(_ahead(trace.events))
        forward = {now for now, _ in ahead[: len(ahead) // 2]}
        return max(len([number for number in numbers if number not in forward]) for _, numbers in ahead[:10])

    assert [across() for _ in range(11)] == [0, *[1] * 7, *[3] * 3]
    model(x)
    assert [across() for _ in range(2)] == [0, 1]


GROUPED = (  # routes, groups and bytes that are ahead; of one group, whole layers are
    {"route": "ring", "group": 2},
    {"route": "direct", "group": 3, "buffers": 10000},
    {"route": "direct", "group": 4},
    {"route": "gather", "buffers": 1 << 20},
    {"route": "ring", "buffers": 1000},
    {"route": "direct"},
)


def _grouped(rank, ranks):
    """Each ring with hops that are late by a random time: the bits of a ring that sends nothing ahead."""
    cases = Cases()
    for options in GROUPED:
        results = []
        for ahead in ({"prefetch": False}, {"transport_options": {"delay_us": 1000}}):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(*pair) for pair in ((8, 24), (24, 40), (40, 8), (8, 8), (8, 16))))
            ring = rtp_ext.Ring(transport="shm", timeout=60.0, **{**options, **ahead})
            model = rtp_ext.fully_rotate(model, mesh=ring, bundle=False)
            optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
            for step in range(4):
                x = torch.randn(3 + rank, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                y = model(x.requires_grad_())
                y.square().sum().backward()
                found += [y.detach(), x.grad, *(full(parameter.grad) for parameter in model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
            results.append(found)
            counts = ring.prefetched()
            ring.close()
        with cases.case(str(options)):
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
            assert 0 < counts[1] == counts[0]
    cases.finish()


def test_groups_ahead_with_hops_that_are_late():
    run_ranks(_grouped, 4)


@on_ranks(3)
def test_channels_last(rank, ranks, ring):
    """Convolutions in another memory format; one rank has no shard."""
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(features, 2 * (ranks - 1), 3, padding=1) for features in (3, *[2 * (ranks - 1)] * 2))
    plain = nn.Sequential(*convolutions).double()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring).to(memory_format=torch.channels_last)
    inputs = [torch.full((1, 3, 4, 4), 1.0 + other, dtype=torch.float64) for other in range(ranks)]
    for _ in range(STEPS):
        plain.zero_grad(), model.zero_grad()
        model(inputs[rank]).square().sum().backward()
        (sum(plain(x).square().sum() for x in inputs) / ranks).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(full(ours.grad), theirs.grad, TOLERANCE, "gradient")
    sent, used = ring.prefetched()
    assert sent == used > 0


def test_a_stale_shard_would_show():
    """Control: the values that `Restless` compares depend on the write."""
    torch.manual_seed(0)
    model = Restless().double()
    x = _input(0, 6)
    with torch.no_grad():
        stale = model.third(model.second(model.first(x)))
    assert differs(model(x), stale, TOLERANCE)


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="expected prefetch True or False, got 3"):
        rtp_ext.Ring.emulated(2, prefetch=3)
