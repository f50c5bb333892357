"""Uses of a model besides a plain training loop: each gives exactly the results of one process, in both variants."""

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks
from models import VOCABULARY, batch_loss, make_batch, make_model, mean_loss, train
from reference import adamw, assert_same, differs, double_copy, full, local, random
from test_convert import assert_same_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext

TOLERANCE = 1e-9  # float64, through AdamW
VARIANTS = [(False, "shm"), (False, "c10d"), (True, "c10d")]  # in place over shm, copies travel as well


def rotated(model: nn.Module, variant: tuple[bool, str], **options) -> nn.Module:
    in_place, transport = variant
    return rtp_ext.fully_rotate(model, in_place=in_place, transport=transport, timeout=30.0, **options)


def check_trained(model, plain, rank, ranks, steps=2, tolerance=TOLERANCE, first=50):
    """Trains both models further and compares them: earlier actions must have left no trace."""
    train(model, lambda step: batch_loss(model, rank, first + step), steps)
    train(plain, lambda step: mean_loss(plain, ranks, first + step), steps)
    assert_same_model(model, plain, tolerance)


def evaluations(rank, ranks, variant):
    """Four evaluations under no_grad between training steps."""
    plain = make_model()
    model = rotated(copy.deepcopy(plain), variant)

    def evaluate(ours, reference):
        ours.eval()
        with torch.no_grad():
            for batch in range(4):
                ids = make_batch(rank, 90 + batch)[0]
                assert_same(ours(ids), reference(ids), TOLERANCE, f"evaluation {batch}")
        ours.train()

    optimizers = adamw(model.parameters(), lr=0.01), adamw(plain.parameters(), lr=0.01)
    for step in range(3):
        evaluate(model, plain)
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch_loss(model, rank, step).backward()
        mean_loss(plain, ranks, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    evaluate(model, plain)
    assert_same_model(model, plain, TOLERANCE)
    assert differs(model(make_batch(rank, 0)[0]), make_model()(make_batch(rank, 0)[0]), TOLERANCE), "control"


def two_forwards(rank, ranks, variant):
    """Two forwards before one backward."""
    plain = make_model()
    model = rotated(copy.deepcopy(plain), variant)
    (batch_loss(model, rank, 0) + 2.0 * batch_loss(model, rank, 1)).backward()
    (mean_loss(plain, ranks, 0) + 2.0 * mean_loss(plain, ranks, 1)).backward()
    assert_same_model(model, plain, TOLERANCE, gradients=True)
    lacking = make_model()
    mean_loss(lacking, ranks, 0).backward()
    whole = full(model.head.weight.grad)
    assert differs(whole, lacking.head.weight.grad, TOLERANCE), "control: one forward is missing"
    check_trained(model, plain, rank, ranks)


def accumulation(rank, ranks, variant):
    """Three micro-batches, whose gradients add up."""
    plain = make_model()
    model = rotated(copy.deepcopy(plain), variant)
    for batch in range(3):
        batch_loss(model, rank, batch).backward()
        mean_loss(plain, ranks, batch).backward()
    assert_same_model(model, plain, TOLERANCE, gradients=True)
    check_trained(model, plain, rank, ranks)


def optimizer_after_evaluation(rank, ranks, variant):
    plain = make_model()
    model = rotated(copy.deepcopy(plain), variant)
    with torch.no_grad():
        model(make_batch(rank, 0)[0])
    model(make_batch(rank, 1)[0])  # a forward without a backward
    check_trained(model, plain, rank, ranks)


class _Refuses(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("in backward")


def exceptions(rank, ranks, variant):
    """An exception in the middle of a forward and of a backward, then clean steps."""
    plain = make_model()
    model = rotated(copy.deepcopy(plain), variant)

    def raise_in_forward(*_):
        raise KeyError("in forward")

    for where in (model.blocks[1], model.blocks[0].down):
        hook = where.register_forward_pre_hook(raise_in_forward)
        with pytest.raises(KeyError, match="in forward"):
            model(make_batch(rank, 0)[0])
        hook.remove()
        assert model.temperature is dict(model.named_parameters())["temperature"], "still inside a forward"
    hook = model.blocks[0].register_forward_hook(lambda module, arguments, output: _Refuses.apply(output))
    value = batch_loss(model, rank, 0)
    with pytest.raises((KeyError, RuntimeError), match="in backward"):
        value.backward()
    hook.remove()
    model.zero_grad()
    check_trained(model, plain, rank, ranks)


def submodule(rank, ranks, variant):
    """Parts of a converted model called directly: a rotated layer, a block, a norm."""
    plain = make_model()
    model = rotated(copy.deepcopy(plain), variant)
    for name in ("blocks.0.up", "blocks.1", "norm", "head"):
        part, reference = model.get_submodule(name), plain.get_submodule(name)
        batches = [random(4, 10, dtype=torch.float64, seed=other) for other in range(ranks)]
        x = batches[rank].clone().requires_grad_()
        y = part(x)
        y.square().sum().backward()
        leaves = [batch.clone().requires_grad_() for batch in batches]
        outputs = [reference(leaf) for leaf in leaves]
        (sum(output.square().sum() for output in outputs) / ranks).backward()
        assert_same(y, outputs[rank], TOLERANCE, name)
        assert_same(x.grad, leaves[rank].grad * ranks, TOLERANCE, f"input gradient of {name}")
    assert_same_model(model, plain, TOLERANCE, gradients=True)
    check_trained(model, plain, rank, ranks)


def tied(rank, ranks, variant):
    plain = make_model(tied=True)
    model = rotated(copy.deepcopy(plain), variant)
    check_trained(model, plain, rank, ranks, steps=3)
    assert model.head.weight is model.embed.weight
    separate = make_model()
    with torch.no_grad():
        for name, parameter in separate.named_parameters():
            parameter.copy_(plain.state_dict()[name])
    (mean_loss(separate, ranks, 0)).backward()
    model.zero_grad()
    batch_loss(model, rank, 0).backward()
    assert differs(full(model.head.weight.grad), separate.head.weight.grad, TOLERANCE), "control: ties that are cut"


def check_checkpointing(rank, ranks, variant, **options):
    plain = make_model()
    model = rotated(make_model(**options), variant)
    check_trained(model, plain, rank, ranks)


def checkpointed_modules(rank, ranks, variant):
    check_checkpointing(rank, ranks, variant, checkpointed=False, inside=False)


def checkpointed_modules_reentrant(rank, ranks, variant):
    check_checkpointing(rank, ranks, variant, checkpointed=True, inside=False)


def checkpointed_methods(rank, ranks, variant):
    """The recomputed function is no module call, and reads a parameter of its own."""
    check_checkpointing(rank, ranks, variant, checkpointed=False, inside=True)


def checkpointed_methods_reentrant(rank, ranks, variant):
    check_checkpointing(rank, ranks, variant, checkpointed=True, inside=True)


def frozen(rank, ranks, variant):
    """Frozen before and after the conversion, and thawed again."""
    plain, model = make_model(), make_model()
    for module in (plain, model):
        module.embed.requires_grad_(False)
        module.blocks[0].up.weight.requires_grad_(False)
    model = rotated(model, variant)
    assert not model.embed.weight.requires_grad and not model.blocks[0].up.weight.requires_grad
    check_trained(model, plain, rank, ranks)
    for module in (plain, model):
        module.blocks[1].requires_grad_(False)
        module.norm.weight.requires_grad_(False)
        module.zero_grad()
    check_trained(model, plain, rank, ranks, first=70)
    for module in (plain, model):
        module.requires_grad_(True)
    check_trained(model, plain, rank, ranks, first=80)


def deep_copies(rank, ranks, variant):
    plain = make_model(tied=True)
    model = rotated(copy.deepcopy(plain), variant)
    train(model, lambda step: batch_loss(model, rank, step), 1)
    train(plain, lambda step: mean_loss(plain, ranks, step), 1)
    twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
    assert twin.head.weight is twin.embed.weight and twin.head.weight is not model.head.weight
    check_trained(twin, plain_twin, rank, ranks)
    assert_same_model(model, plain, TOLERANCE)  # the original has not moved
    check_trained(model, plain, rank, ranks, first=60)


def clipping(rank, ranks, variant):
    plain = make_model()
    model = rotated(copy.deepcopy(plain), variant)
    ours = train(model, lambda step: batch_loss(model, rank, step), 3, clip=0.05)
    theirs = train(plain, lambda step: mean_loss(plain, ranks, step), 3, clip=0.05)
    assert min(theirs) > 0.05, "the norm is to be clipped"
    ours, theirs = (torch.tensor(norms, dtype=torch.float64) for norms in (ours, theirs))
    assert_same(ours, theirs, TOLERANCE, "norms")
    assert_same_model(model, plain, TOLERANCE)


def penalty(rank, ranks, variant):
    """A term of the loss that reads a parameter between forward and backward sees the local shard."""
    plain = make_model()
    model = rotated(copy.deepcopy(plain), variant)
    value = batch_loss(model, rank, 0)
    squares = sum(p.square().sum() for p in model.parameters())
    expected = sum(p.square().sum() for p in plain.parameters())
    assert_same(full(squares), expected, TOLERANCE, "sum of squares")
    value.backward()
    mean_loss(plain, ranks, 0).backward()
    assert_same_model(model, plain, TOLERANCE, gradients=True)


def two_models(rank, ranks, variant):
    """Two converted models, each with its ring, used in turn and inside one graph."""
    plains = make_model(), make_model(blocks=1)
    models = [rotated(copy.deepcopy(plain), variant) for plain in plains]
    assert rtp_ext.ring_of(models[0]) is not rtp_ext.ring_of(models[1])
    (batch_loss(models[0], rank, 0) * batch_loss(models[1], rank, 1)).backward()
    sum(batch_loss(plains[0], other, 0) * batch_loss(plains[1], other, 1) / ranks for other in range(ranks)).backward()
    for model, plain in zip(models, plains, strict=True):
        assert_same_model(model, plain, TOLERANCE, gradients=True)
        check_trained(model, plain, rank, ranks)


def change_of_dtype(rank, ranks, variant):
    """`.to(dtype)` any time before the first step."""
    plain = make_model(torch.float32)
    model = rotated(copy.deepcopy(plain), variant)
    with torch.no_grad():
        model(make_batch(rank, 0)[0])
    check_trained(model.to(torch.float64), double_copy(plain), rank, ranks)


BEHAVIOURS = [
    evaluations,
    two_forwards,
    accumulation,
    optimizer_after_evaluation,
    exceptions,
    submodule,
    tied,
    checkpointed_modules,
    checkpointed_modules_reentrant,
    checkpointed_methods,
    checkpointed_methods_reentrant,
    frozen,
    deep_copies,
    clipping,
    penalty,
    two_models,
    change_of_dtype,
]


@on_ranks(3, timeout=300.0)
@pytest.mark.parametrize("half", [0, 1])
def test_like_one_process(rank, ranks, half):
    behaviours = BEHAVIOURS[half::2]
    # in place for each, and one in three with each of the others
    enough = [
        (behaviour, variant)
        for behaviour in behaviours
        for number, variant in enumerate(VARIANTS)
        if number in (2, BEHAVIOURS.index(behaviour) // 2 % 4)
    ]
    for behaviour, variant in few(enough, list(product(behaviours, VARIANTS))):
        try:
            behaviour(rank, ranks, variant)
        except Exception as error:
            where = f"{behaviour.__name__}, in_place={variant[0]} transport={variant[1]}"
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "members"), [(4, [[0, 1], [2, 3]]), (4, [[0, 2], [1, 3]]), (3, [[0, 2]]), (3, [[1], [0, 2]])]
)
def test_rings_of_some_ranks(rank, ranks, members):
    """Every group of ranks trains its own model; ranks outside all groups do nothing. Then all ranks form a group."""
    groups = [dist.new_group(group) for group in members]
    _train_apart(rank, groups, members)
    together = torch.ones(())
    dist.all_reduce(together, group=dist.new_group())
    assert together == ranks


def _train_apart(rank, groups, members):
    mine = next((number for number, group in enumerate(members) if rank in group), None)
    if mine is None:
        return
    place, size = members[mine].index(rank), len(members[mine])
    for variant in VARIANTS:
        plain = make_model()
        model = rotated(copy.deepcopy(plain), variant, mesh=groups[mine])
        ring = rtp_ext.ring_of(model)
        assert (ring.rank, ring.size) == (place, size)
        # Batches differ between the groups, so that a contribution from outside would show.
        train(model, lambda step, model=model: batch_loss(model, place, step + 100 * mine), 3)
        train(plain, lambda step, plain=plain: mean_loss(plain, size, step + 100 * mine), 3)
        assert_same_model(model, plain, TOLERANCE)
        ring.close()


@on_ranks(4)
def test_ring_along_a_mesh_dimension(rank):
    """A ring along one dimension of a larger mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "rtp"))
    plain = make_model()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh["rtp"], timeout=30.0)
    assert rtp_ext.ring_of(model).size == 2
    check_trained(model, plain, rank % 2, 2)


@on_ranks(3)
def test_no_whole_weight_is_saved(rank):
    """Autograd keeps no received weight, cast or not: it saves inputs and local shards."""
    for autocast in (False, True):
        model = rotated(make_model(torch.float32), (False, "shm"))
        local_shards = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
        shapes = []

        def pack(tensor, local_shards=local_shards, shapes=shapes):
            plain = local(tensor.detach())
            if plain.untyped_storage().data_ptr() not in local_shards:
                shapes.append(tuple(plain.shape))
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            batch_loss(model, rank, 0).backward()
        assert shapes, "inputs are saved"
        whole = {tuple(p.shape) for p in make_model().parameters() if p.dim() == 2}
        assert (VOCABULARY, 10) in whole and not whole & set(shapes), f"whole weights were saved: {whole & set(shapes)}"
        shards = {tuple(local(p).shape) for p in model.parameters() if p.dim() == 2}
        assert not shards & set(shapes), f"shards were saved that are not at home: {shards & set(shapes)}"
