"""The ring over the ranks that share a sequence: weights travel among the ranks that exchange keys and values. torch's
context_parallel has no kernel for CPUs; keys and values are gathered here in a few lines."""

import copy

import torch
import torch.distributed as dist
from harness import Cases, on_ranks
from reference import adamw, assert_same, differs, full, random, whole_gradients, whole_parameters
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext

TOLERANCE = 1e-9
VOCABULARY, WIDTH, HEADS, SEQUENCE, STEPS = 19, 10, 2, 12, 4


class Sequence:
    """The cuts of [batch, SEQUENCE, ...] over the ranks of a group: rank r has positions bounds[r] to bounds[r + 1]."""

    def __init__(self, group: dist.ProcessGroup | None, bounds: list[int]) -> None:
        place = dist.get_rank(group) if group else 0
        self.group, self.begin, self.end = group, bounds[place], bounds[place + 1]

    def part(self, whole: Tensor) -> Tensor:
        return whole[:, self.begin : self.end]


class Whole(torch.autograd.Function):
    """Every rank's part of the sequence; the gradient of a part is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx, part: Tensor, sequence: Sequence) -> Tensor:
        ctx.sequence = sequence
        whole = part.new_zeros(part.shape[0], SEQUENCE, part.shape[2])
        sequence.part(whole).copy_(part)
        dist.all_reduce(whole, group=sequence.group)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.sequence.group)
        return ctx.sequence.part(total).contiguous(), None


class CausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # the softmax takes no notice of a bias
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 23), nn.GELU(), nn.Linear(23, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, sequence: Sequence) -> Tensor:
        """ids [batch, positions of this rank]"""
        positions = torch.arange(sequence.begin, sequence.end)
        x = self.embed(ids) + self.positions(positions)
        q, k, v = (layer(self.norm(x)) for layer in (self.q, self.k, self.v))
        if sequence.group is not None:
            k, v = Whole.apply(k, sequence), Whole.apply(v, sequence)
        # as many heads as there are here: tensor parallelism cuts them
        q, k, v = (each.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (q, k, v))
        later = torch.arange(SEQUENCE) > positions.unsqueeze(1)
        scores = (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(x))


def make_model() -> CausalModel:
    model = CausalModel().double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=500 + number) * 0.4)
    return model


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * replica + step)
    ids = torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def total_loss(model: nn.Module, ids: Tensor, targets: Tensor, sequence: Sequence) -> Tensor:
    logits = model(sequence.part(ids), sequence)
    return nn.functional.cross_entropy(logits.flatten(0, 1), sequence.part(targets).flatten(), reduction="sum")


def compare(cases: Cases, label: str, mesh, sequence: Sequence, replica: int, replicas: int) -> None:
    """`mesh`: of the ring, which holds every replica's ranks."""
    plain = make_model()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh, timeout=60.0)
    alone = Sequence(None, [0, SEQUENCE])
    tokens = 2 * SEQUENCE * replicas
    ours, theirs = adamw(model.parameters(), lr=0.01), adamw(plain.parameters(), lr=0.01)
    for step in range(STEPS):
        ours.zero_grad(), theirs.zero_grad()
        # gradients are averaged over the ring; with as many tokens on every rank this is the mean over the rank's own
        (total_loss(model, *batch(replica, step), sequence) * mesh.size() / tokens).backward()
        (sum(total_loss(plain, *batch(each, step), alone) for each in range(replicas)) / tokens).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, plain)]
        ours.step(), theirs.step()
        with cases.case(f"{label}: step {step}"):
            assert_same(full(norms[0]), norms[1], TOLERANCE, "norm of the gradients")
            gradients, weights = whole_gradients(model), whole_parameters(model)
            for name, expected in plain.named_parameters():
                assert_same(gradients[name], expected.grad, TOLERANCE, f"gradient of {name}")
                assert_same(weights[name], expected, TOLERANCE, name)
    with cases.case(f"{label}: control"):
        plain.zero_grad()
        ids, targets = batch(replica, STEPS - 1)
        logits = sequence.part(plain(ids, alone))
        own = nn.functional.cross_entropy(logits.flatten(0, 1), sequence.part(targets).flatten())
        own.backward()
        for (name, actual), local in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert differs(full(actual.grad), local.grad, 1e-3), f"{name}: a rank's own loss would do"
    rtp_ext.ring_of(model).close()


@on_ranks(3)
def test_a_ring_of_the_ranks_of_one_sequence(ranks, cases):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    compare(cases, "unequal parts", mesh, Sequence(mesh.get_group(), [0, 1, 8, 12]), 0, 1)


@on_ranks(4)
def test_a_ring_of_the_ranks_of_two_sequences(cases):
    """The ring contains the ranks of two sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ring = mesh["dp", "cp"]._flatten("dp_cp")
    sequence = Sequence(mesh.get_group("cp"), [0, 6, 12])
    compare(cases, "2 x 2", ring, sequence, mesh.get_coordinate()[0], 2)
