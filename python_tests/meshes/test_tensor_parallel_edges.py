"""Tensor parallelism under rotation: further ways to run models, refusals, and the log."""

import contextlib
import logging

import pytest
import torch
from harness import on_ranks
from reference import assert_same, full, random, whole_gradients
from tensor_models import (
    EXACT,
    HIDDEN,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Tiny,
    adamw,
    batch_loss,
    batch_number,
    parallel,
    replicated_activations,
    rotated,
    sequence_parallel,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext import RotationDims

NAMES = ("ring", "tp")


def expected_gradients(batches, step=0, model=None):
    plain = Tiny() if model is None else model
    (sum(batch_loss(plain, batch, step) for batch in range(batches)) / batches).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


def assert_gradients(model, expected, what, tolerance=EXACT):
    for name, gradient in whole_gradients(model).items():
        assert_same(gradient, expected[name], tolerance, what + name)


def both(activations=sequence_parallel, embedding=RowwiseParallel, model=None, **options):
    return rotated((2, 2), NAMES, activations(embedding), model=model, **options)


class Checkpointed(Tiny):
    reentrant = False

    def forward(self, ids):
        x = checkpoint(self.block, self.embed(ids), use_reentrant=self.reentrant)
        logits = self.head(self.norm(x))
        return self.last(logits + self.mix(logits)) * self.temperature


def running(cases):
    model, mesh = both()
    batch, batches = batch_number(mesh)
    expected = expected_gradients(batches)
    with cases.case("in place, over c10d"):
        placed, _ = both(in_place=True, transport="c10d")
        for _ in range(2):
            batch_loss(placed, batch, 0).backward()
        assert_gradients(placed, {name: 2 * value for name, value in expected.items()}, "in place: ")
    with cases.case("evaluated first"):
        with torch.inference_mode():
            first = batch_loss(model, batch, 0)
        with torch.no_grad():
            second = batch_loss(model, batch, 0)
        assert_same(first, batch_loss(Tiny(), batch, 0), EXACT, "inference_mode")
        assert_same(second, first, 0.0, "no_grad")
    with cases.case("micro-batches, a layer frozen"):
        model.block.attention.o.weight.requires_grad_(False)
        batch_loss(model, batch, 0).backward()
        batch_loss(model, batch, 0).backward()
        twice = {name: 2 * value for name, value in expected.items()} | {"block.attention.o.weight": None}
        assert_gradients(model, twice, "two: ")
    for reentrant in (False, True):
        with cases.case(f"activation checkpointing, reentrant {reentrant}"):
            other = Checkpointed()
            other.reentrant = reentrant
            other, _ = both(replicated_activations, model=other)
            batch_loss(other, batch, 0).backward()
            assert_gradients(other, expected, "checkpoint: ")
    with cases.case("a divide factor"):
        rtp_ext.set_gradient_divide_factor(other, 1)
        other.zero_grad()
        batch_loss(other, batch, 0).backward()
        assert_gradients(other, {name: batches * value for name, value in expected.items()}, "sum: ")
    with cases.case("bfloat16"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        narrow, _ = both(model=Tiny(dtype=torch.float32), mp_policy=policy)
        batch_loss(narrow, batch, 0).backward()
        for name, parameter in narrow.named_parameters():
            error = (full(parameter.grad).double() - expected[name]).norm() / expected[name].norm()
            assert error < 0.1, f"{name}: {error}"  # nothing counted twice


def loss_on_shards(cases):
    with cases.case("loss_parallel"):
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)).double()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))
        plain = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)).double()
        plain.load_state_dict(model.state_dict())
        plan = {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "1": ColwiseParallel(use_local_output=False),
        }
        model, mesh = rotated((2, 2), NAMES, plan, model=model)
        batch, batches = batch_number(mesh)

        def loss(module, number):
            ids = torch.randint(VOCABULARY, (2 * TOKENS,), generator=torch.Generator().manual_seed(number))
            return nn.functional.cross_entropy(module(ids), ids.flip(0))

        with loss_parallel():
            loss(model, batch).backward()
        (sum(loss(plain, number) for number in range(batches)) / batches).backward()
        assert_gradients(model, {name: p.grad for name, p in plain.named_parameters()}, "loss_parallel: ")


def called_wrongly(cases, rank):
    model, mesh = both(replicated_activations)
    with cases.case("a forward without its hooks"), pytest.raises(TypeError, match=r"head: expected a DTensor on .*tp"):
        model.head.forward(torch.ones(2, WIDTH, dtype=torch.float64))
    with (
        cases.case("an input on another mesh"),
        pytest.raises(ValueError, match=r"head: expected an input on .*tp.*ring"),
    ):
        model.head(DTensor.from_local(torch.ones(2, WIDTH, dtype=torch.float64), mesh["ring"], [Replicate()]))
    with cases.case("a DTensor for a layer that no plan names"), pytest.raises(TypeError, match=r"mix: .*got DTensor"):
        model.mix(DTensor.from_local(torch.ones(2, VOCABULARY, dtype=torch.float64), mesh["tp"], [Replicate()]))
    with cases.case("an id out of range"), pytest.raises(IndexError):
        model.embed(torch.tensor([[0, VOCABULARY]]))
    with cases.case("an input that is laid out otherwise"):
        x = random(4, WIDTH, dtype=torch.float64, seed=5)
        y = model.head(distribute_tensor(x, mesh["tp"], [Shard(0)]))
        assert_same(y, Tiny().head(x), EXACT, "head")


def different_inputs(cases, rank):
    for name, layer in (("a norm", nn.RMSNorm(4)), ("a linear layer", nn.Linear(4, 4)), ("alike", nn.Identity())):
        with cases.case(f"different inputs: {name}"):
            model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 4), nn.LayerNorm(4))
            model, _ = rotated((2, 2), NAMES, {"0": ColwiseParallel(), "2": RowwiseParallel()}, model=model)
            x, weights = (random(3, 4, dtype=torch.float32, seed=rank // 2 + seed) for seed in (0, 5))
            loss = (model(x) * weights).sum()
            if name == "alike":
                loss.backward()
            else:
                with pytest.raises(ValueError, match=r"of shape \(4,\), which every rank .* not the same on them"):
                    loss.backward()


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


@contextlib.contextmanager
def records():
    handler = Records()
    logging.getLogger("rtp_ext").addHandler(handler)
    logging.getLogger("rtp_ext").setLevel(logging.INFO)
    try:
        yield handler.found
    finally:
        logging.getLogger("rtp_ext").removeHandler(handler)


def logged(cases, rank):
    with cases.case("bundles and the log"), records() as found:
        both()
        text = "\n".join(found)
        assert "1 x Sequential: layers of its MLP rotate one by one: tensor parallelism has cut them" in text, text
        assert "5 x Linear: rotated, colwise tensor parallel" in text, text
        assert "2 x Linear: rotated, rowwise tensor parallel" in text, text
        assert "1 x Embedding: rotated, rowwise tensor parallel" in text, text
    with cases.case("weights that differ along the ring"), records() as found:
        model = Tiny()
        with torch.no_grad():
            model.head.weight.add_(float(rank // 2))
        both(model=model)
        warned = any("the values of head.weight on rank 1 are not those on rank 0" in line for line in found)
        assert warned == (rank < 2), found  # one warning for each ring


def one(layer, **placements):
    """Returns a layer whose parameters have the given placements over "tp", and the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    for key, placement in placements.items():
        value = getattr(layer, key).detach()
        made = (
            DTensor.from_local(value, mesh["tp"], [placement], run_check=False)
            if placement.is_partial()
            else distribute_tensor(value, mesh["tp"], [placement])
        )
        setattr(layer, key, nn.Parameter(made))
    return nn.Sequential(layer), mesh


def two_dimensions():
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("ring", "a", "b"))
    weight = distribute_tensor(torch.ones(4, 4), mesh["a", "b"], [Shard(0), Shard(1)])
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(weight)
    return nn.Sequential(layer), mesh


def two_meshes():
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("ring", "a", "b"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh["a"], {"0": ColwiseParallel()})
    return parallelize_module(model, mesh["b"], {"1": ColwiseParallel()}), mesh


def plain_model():
    return nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)


def other_root():
    model, _ = one(nn.Linear(4, 4), weight=Shard(0), bias=Shard(0))
    return model, init_device_mesh("cpu", (4, 1), mesh_dim_names=NAMES)


def attention():
    model, mesh = one(nn.MultiheadAttention(4, 2))
    return parallelize_module(model, mesh["tp"], {"0.out_proj": RowwiseParallel()}), mesh


REFUSED = {
    "no tensor parallelism": (plain_model, "every dimension of the mesh to be named, got tp of 2"),
    "two dimensions of one parameter": (two_dimensions, "every dimension of the mesh to be named, got a of 2, b of 2"),
    "two dimensions of two layers": (two_meshes, r"over one dimension of the mesh, got a \(0\), b \(1\)"),
    "another root": (other_root, r"got weight of 0 \(Linear\), a DTensor .*over another dimension of the same mesh"),
    "a colwise weight, a whole bias": (
        lambda: one(nn.Linear(4, 4), weight=Shard(0), bias=Replicate()),
        r"0 \(Linear\) is tensor parallel with placements \{'weight': Shard\(dim=0\), 'bias': Replicate\(\)\}",
    ),
    "a plain bias": (lambda: one(nn.Linear(4, 4), weight=Shard(0)), r"0 \(Linear\) is tensor parallel with"),
    "a partial weight": (lambda: one(nn.Linear(4, 4, bias=False), weight=Partial()), r"'weight': Partial"),
    "a norm that is cut": (
        lambda: one(nn.LayerNorm(4), weight=Shard(0), bias=Shard(0)),
        r"0 \(LayerNorm\) is tensor parallel .*that are all Replicate\(\)",
    ),
    "a convolution": (lambda: one(nn.Conv1d(4, 4, 1, bias=False), weight=Shard(0)), r"0 \(Conv1d\) is tensor parallel"),
    "nn.MultiheadAttention": (attention, r"0.out_proj \(NonDynamicallyQuantizableLinear\) is tensor parallel"),
    "max_norm": (lambda: one(nn.Embedding(4, 4, max_norm=1.0), weight=Shard(0)), "but max_norm=1.0 renormalises"),
    "fewer rows than ranks": (
        lambda: one(nn.Linear(4, 1, bias=False), weight=Shard(0)),
        r"its weight of shape \(1, 4\) has no part for the last of 2 ranks",
    ),
}


def refused(cases):
    for name, (make, message) in REFUSED.items():
        with cases.case(f"refused: {name}"):
            model, mesh = make()
            before = dict(model.named_parameters())
            with pytest.raises(ValueError, match=message):
                rtp_ext.fully_rotate(model, mesh=mesh, dims=RotationDims(), timeout=30.0)
            assert all(before[name] is parameter for name, parameter in model.named_parameters())
    with cases.case("refused: a mesh of the ring alone"):
        model, mesh = parallel((2, 2), NAMES, sequence_parallel(RowwiseParallel))
        with pytest.raises(ValueError, match=r"mesh=mesh, dims=RotationDims\(ring=...\)"):
            rtp_ext.fully_rotate(model, mesh=mesh["ring"])
    with cases.case("refused: ZeroOuter"):
        for shape in ((2, 2, 1), (1, 2, 2)):
            other, three = parallel(shape, ("replicas", "tp", "ring"), sequence_parallel(RowwiseParallel))
            before = dict(other.named_parameters())
            dims = RotationDims(replicate="replicas")
            with pytest.raises(ValueError, match=r"ZeroOuter cannot be .* tensor parallelism .*'tp'.*AllReduce\(\)"):
                rtp_ext.fully_rotate(other, mesh=three, dims=dims, outer=rtp_ext.outer.ZeroOuter(), timeout=30.0)
            assert all(before[name] is parameter for name, parameter in other.named_parameters())
    with cases.case("refused: an optimizer of before"):
        early = adamw(model)
        rtp_ext.fully_rotate(model, mesh=mesh, dims=RotationDims(), timeout=30.0)
        with pytest.raises(ValueError, match="after fully_rotate"):
            early.step()
    with cases.case("parts first, ignored parameters, a replicated layer"):
        model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN).double() for _ in range(4)))
        plain = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN).double() for _ in range(4)))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))
        plain.load_state_dict(model.state_dict())
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": SequenceParallel(sequence_dim=0)}
        parallelize_module(model, mesh["tp"], plan)
        options = {"mesh": mesh, "dims": RotationDims(), "timeout": 30.0}
        rtp_ext.fully_rotate(model[0], **options)
        rtp_ext.fully_rotate(model[1:3], **options)
        ignored = list(model[3].parameters())
        model[2].register_forward_hook(lambda _m, _a, y: y.full_tensor())
        rtp_ext.fully_rotate(model, ignored_params=ignored, **options)
        rank, x = mesh.get_local_rank("ring"), [random(4, HIDDEN, dtype=torch.float64, seed=9 + i) for i in range(2)]
        half = x[rank].chunk(2)[mesh.get_local_rank("tp")]
        y = model[1](model[0](x[rank]))
        assert_same(y, plain[1](plain[0](x[rank])), EXACT, "two layers")
        model[3](model[2](half)).square().sum().backward()
        sum(plain[3](plain[2](each)).square().sum() / 2 for each in x).backward()
        assert_same(full(model[2].weight.grad), plain[2].weight.grad, EXACT, "a replicated layer")
        assert model[3].weight is ignored[0]


@on_ranks(4)
def test_edges(rank, cases):
    running(cases)
    loss_on_shards(cases)
    called_wrongly(cases, rank)
    different_inputs(cases, rank)
    logged(cases, rank)
    refused(cases)
