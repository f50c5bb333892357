"""Selective activation checkpointing (torch.utils.checkpoint.create_selective_checkpoint_contexts) of converted models:
they train like the plain model under the same policy, and a recomputation makes the hops of the unsaved operations."""

import copy
from typing import Any

import pytest
import torch
from grids import few
from harness import Cases, on_ranks
from hf_models import C10D, SHM, batch_loss, check_trained, exact, rotated
from reference import adamw, assert_same, differs, random, whole_gradients, whole_parameters
from selective import POLICIES, SAVES_ROTATIONS, contexts, region
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import rtp_ext
from rtp_ext import RotationDims

TOLERANCE = 1e-10
TIMEOUT = 30.0
WIDTH, VOCABULARY, LAYERS, STEPS = 8, 13, 2, 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 11), nn.GELU(), nn.Linear(11, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.scale * self.mix(self.mlp(self.norms[1](x)))


class Model(nn.Module):
    """Its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.policy: str | None = None
        self.around = False  # whether one region holds the embedding, the layers and the head
        for number, parameter in enumerate(self.parameters()):
            values = random(*parameter.shape, dtype=torch.float64, seed=number)
            parameter.data = values * 0.4 + (parameter.dim() < 2)

    def computed(self, ids: Tensor, given: Tensor) -> Tensor:
        x = self.embed(ids) + given
        for layer in self.layers:
            x = region(layer, None if self.around else self.policy, x)
        return self.head(x)

    def forward(self, ids: Tensor, given: Tensor) -> Tensor:
        return region(self.computed, self.policy if self.around else None, ids, given)


def make_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = torch.randint(VOCABULARY, (2, 5), generator=generator)
    return ids, torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Trained:
    """Outputs and gradients of a first step, and parameters after all of them, of one rank's batches or all of them."""

    def __init__(self, model: nn.Module, ranks: list[int], call: Any = None) -> None:
        ring = rtp_ext.ring_of(model) if isinstance(model.embed, rtp_ext.nn.RotatedEmbedding) else None
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            batches = [make_batch(rank, step) for rank in ranks]
            ids, x = (torch.cat(each) for each in zip(*batches, strict=True))
            x.requires_grad_()
            optimizer.zero_grad()
            start = _hops(ring)
            output = (model if call is None else call)(ids, x)
            middle = _hops(ring)
            loss_of(output, ids).backward()
            self.hops = (
                [b - a for a, b in zip(start, middle, strict=True)],
                [b - a for a, b in zip(middle, _hops(ring), strict=True)],
            )
            if step == 0:
                self.first = {"output": output.detach(), "input gradient": x.grad}
                self.first |= {f"gradient of {name}": value for name, value in whole_gradients(model).items()}
            optimizer.step()
        self.parameters = whole_parameters(model)

    def check(self, cases: Cases, name: str, plain: "Trained", rank: int) -> None:
        with cases.case(name):
            for what, expected in plain.first.items():
                mine = expected[2 * rank : 2 * rank + 2] if what in ("output", "input gradient") else expected
                assert_same(self.first[what], mine, TOLERANCE, what)
            for what, expected in plain.parameters.items():
                assert_same(self.parameters[what], expected, TOLERANCE, f"{what} after {STEPS} steps")


def _hops(ring: Any) -> tuple[int, int]:
    return (0, 0) if ring is None else (ring.hops("weight"), ring.hops("gradient"))


def expected_hops(ring: Any, policy: str | None, around: bool | str) -> Any:
    """Returns the hops of the forward and the backward of a step: weights, gradients. A norm's gather is no hop."""
    hops, inside, every = ring.size - 1, 4 * LAYERS, 4 * LAYERS + 2
    again = every if around is True else inside
    if policy is None or policy in SAVES_ROTATIONS:
        again = 0
    elif policy == "mlp":
        again -= LAYERS
    return [hops * every, 0], [hops * (every - 1 + again), hops * every]


ENOUGH = (None, "nothing", "everything", "matrices", "mlp", "rotations")
EACH = [(policy, False) for policy in few(ENOUGH, (None, *POLICIES))]
WHOLE = [("nothing", True), ("everything", True), ("rotations", True)]
SOME = [("every other product", False), ("rotations", False)]
WRAPPED = [("every other product", "wrapped"), ("rotations", "wrapped")]


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "policies", "options", "mesh"),
    [
        (2, EACH, {"transport": "shm", "route": "ring"}, None),
        (
            2,
            [("nothing", True), ("everything", True), ("rotations", True)],
            {"transport": "shm", "route": "ring"},
            None,
        ),
        (3, [*SOME, ("everything", False)], {"transport": "c10d", "route": "ring"}, None),
        (2, SOME, {"transport": "c10d", "route": "ring", "prefetch": 0}, None),
        (4, SOME, {"transport": "shm", "route": "ring"}, (2, 2)),
    ],
    ids=["each", "other regions", "three ranks", "no prefetch", "replicas"],
)
def test_trains_as_the_plain_model(rank, ranks, cases, policies, options, mesh):
    for policy, around in policies:
        plain = Model()
        if around == "wrapped":  # as torchtitan does, before the model is converted
            for number, layer in enumerate(plain.layers):
                plain.layers[number] = checkpoint_wrapper(layer, context_fn=contexts(POLICIES[policy]))
        else:
            plain.policy, plain.around = policy, around
        model, expected = copy.deepcopy(plain), Trained(plain, list(range(ranks)))
        if mesh is None:
            model = rtp_ext.fully_rotate(model, mesh=rtp_ext.Ring(timeout=TIMEOUT, **{"prefetch": False, **options}))
        else:
            dims = RotationDims(ring="ring", replicate="replicas")
            meshed = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "ring"))
            model = rtp_ext.fully_rotate(model, mesh=meshed, dims=dims, timeout=TIMEOUT, buffers="lean", **options)
        ring, what = rtp_ext.ring_of(model), f"{policy}, around {around}, {options}"
        mine = Trained(model, [rank])
        expected.first["input gradient"] = expected.first["input gradient"] * ranks
        mine.check(cases, what, expected, rank)
        with cases.case(f"{what}: hops"):
            assert mine.hops == expected_hops(ring, policy, around), mine.hops
        with cases.case(f"{what}: controls"):
            alone = Model()
            loss_of(alone(*make_batch(rank, 0)), make_batch(rank, 0)[0]).backward()
            right = expected.first["gradient of embed.weight"]
            assert differs(alone.embed.weight.grad, right, 100 * TOLERANCE), "one rank's batch alone"
        ring.close()


@on_ranks(2)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(rank, cases, backend):
    policies = few(["rotations"], ["every other product", "everything", "rotations"])
    for policy in policies:
        torch._dynamo.reset()
        models = []
        for _ in range(2):
            model = Model()
            model.policy = policy
            models.append(rtp_ext.fully_rotate(model, mesh=rtp_ext.Ring(timeout=TIMEOUT, route="ring", prefetch=False)))
        eager, compiled = models
        expected = Trained(eager, [rank])
        mine = Trained(compiled, [rank], torch.compile(compiled, backend=backend))
        mine.check(cases, f"{policy}, {backend}", expected, 0)
        with cases.case(f"{policy}, {backend}: hops"):
            assert mine.hops == expected.hops == expected_hops(rtp_ext.ring_of(eager), policy, False), mine.hops
        for model in models:
            rtp_ext.ring_of(model).close()


@on_ranks(2)
def test_models_of_transformers(rank, ranks):
    for kind, policy, variant in TRANSFORMERS:
        plain = exact(kind)
        model = rotated(copy.deepcopy(plain), variant)
        check_trained(model, plain, kind, rank, ranks, steps=1)
        ring = rtp_ext.ring_of(model)
        before = ring.hops("weight")
        batch_loss(model, kind, rank, 3).backward()
        once = ring.hops("weight") - before
        options = {"use_reentrant": False, "context_fn": contexts(POLICIES[policy])}
        for each in (model, plain):
            each.zero_grad()
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        check_trained(model, plain, kind, rank, ranks)
        before = ring.hops("weight")
        batch_loss(model, kind, rank, 3).backward()
        sent = ring.hops("weight") - before
        assert (sent == once) == (policy in SAVES_ROTATIONS), f"{kind}, {policy}: {once} hops, then {sent}"
        ring.close()


TRANSFORMERS = [
    ("llama", "every other product", SHM),
    ("tied", "rotations", C10D),
    ("gpt2", "everything", SHM),
    ("mixtral", "rotations", SHM),
]


@on_ranks(2)
def test_autocast(rank, ring, cases):
    """In bfloat16 the reference is the same model without checkpoints."""
    model = rtp_ext.fully_rotate(Model().float(), mesh=ring)
    ids, x = make_batch(rank, 0)
    found = {}
    for policy in (None, "nothing", "everything", "matrices", "rotations"):
        model.policy = policy
        model.zero_grad()
        given = x.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(ids, given).float(), ids)
        loss.backward()
        found[policy] = {"loss": loss.detach(), "input": given.grad, **whole_gradients(model)}
        with cases.case(f"{policy}"):
            for name, expected in found[None].items():
                assert_same(found[policy][name], expected, 1e-6, name)
    with cases.case("control"):
        assert found[None]["loss"].item() != loss_of(Model()(ids, x), ids).item(), "nothing was cast"
