"""Random operators on shards: the values of the plain parameter under the same seed, as if the ranks drew it whole."""

import copy

import pytest
import torch
from harness import on_ranks
from reference import wholes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rtp_ext


def make() -> nn.ModuleDict:
    """Rotated layers, gathered ones, and shapes that ranks do not divide; a row of `few` is on one rank alone."""
    layers = {
        "linear": nn.Linear(9, 7),
        "embedding": nn.Embedding(11, 6, padding_idx=2),
        "norm": nn.LayerNorm(7),
        "lstm": nn.LSTM(5, 4, num_layers=2),
        "cell": nn.GRUCell(5, 4),
        "bilinear": nn.Bilinear(3, 4, 5),
        "transposed": nn.ConvTranspose1d(4, 6, 3),
        "bag": nn.EmbeddingBag(11, 5),
        "attention": nn.MultiheadAttention(8, 2),
        "few": nn.Bilinear(20, 20, 1),
    }
    return nn.ModuleDict(layers)


def reset(model: nn.Module) -> None:
    for part in model.children():
        (part._reset_parameters if isinstance(part, nn.MultiheadAttention) else part.reset_parameters)()


def applied(model: nn.Module) -> None:
    """As models of the transformers package initialise themselves."""

    def init(part: nn.Module) -> None:
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight.data.normal_(0.0, 0.02)

    model.apply(init)


def each(change):
    """Changes every matrix of a model."""

    def run(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    change(parameter)

    return run


WAYS = {
    "reset_parameters": reset,
    "apply": applied,
    "normal_": each(lambda p: nn.init.normal_(p, std=0.02)),
    "uniform_": each(lambda p: nn.init.uniform_(p, -1, 1)),
    "xavier_uniform_": each(nn.init.xavier_uniform_),
    "kaiming_normal_": each(nn.init.kaiming_normal_),
    "trunc_normal_": each(lambda p: nn.init.trunc_normal_(p, std=0.02)),
    "data.normal_": each(lambda p: p.data.normal_(1.0, 2.0)),
    "a generator": each(lambda p: p.normal_(generator=torch.Generator().manual_seed(4))),
    "bernoulli_": each(lambda p: p.bernoulli_(0.3)),
    "randn_like": each(lambda p: p.copy_(torch.randn_like(p))),
    "rand_like": each(lambda p: p.add_(torch.rand_like(p), alpha=0.1)),
}


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "replicas", "outer"), [(3, False, None), (4, True, "AllReduce"), (4, True, "ZeroOuter")]
)
def test_shards_are_parts_of_what_a_plain_model_draws(ranks, cases, replicas, outer):
    options = {"timeout": 30.0}
    if replicas:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "ring"))
        options |= {"mesh": mesh, "dims": rtp_ext.RotationDims(ring="ring", replicate="replica")}
        options["outer"] = getattr(rtp_ext.outer, outer)()
    torch.manual_seed(0)
    plain = make()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), **options)
    for what, change in WAYS.items():
        with cases.case(what):
            before = {name: p.detach().clone() for name, p in plain.named_parameters()}
            for which in (plain, model):
                torch.manual_seed(7)
                change(which)
                following = torch.rand(1)
                if which is plain:
                    expected = following
            assert torch.equal(following, expected), "what is drawn next would have other values"
            found = wholes(model.parameters())
            for (name, p), whole in zip(plain.named_parameters(), found, strict=True):
                assert torch.equal(whole, p.detach()), f"{name}: {whole}, expected {p}"
            changed = [name for name, p in plain.named_parameters() if not torch.equal(before[name], p)]
            assert len(changed) > 1, "control: it draws"
    with cases.case("in another memory format, and on the meta device"):
        weight = model["transposed"].weight
        weight.to_local().data = weight.to_local().transpose(1, 2).contiguous().transpose(1, 2)
        torch.manual_seed(8)
        right = torch.empty(weight.shape).normal_()
        torch.manual_seed(8)
        nn.init.normal_(weight)
        assert torch.equal(wholes([weight])[0], right)
        if not replicas:
            with torch.device("meta"):
                empty = rtp_ext.fully_rotate(nn.Sequential(nn.Linear(4, 4)), mesh=rtp_ext.ring_of(model))
            state = torch.get_rng_state()
            nn.init.normal_(empty[0].weight)
            assert torch.equal(torch.get_rng_state(), state)
    with cases.case("shards of others keep torch's rule"):
        mesh = init_device_mesh("cpu", (2, ranks // 2) if ranks % 2 == 0 and not replicas else (1, ranks))
        others = distribute_tensor(torch.zeros(2 * ranks, 3), mesh, [Shard(0), Shard(1)])
        torch.manual_seed(9)
        right = torch.empty(others.to_local().shape).normal_()
        torch.manual_seed(9)
        assert isinstance(others.normal_(), DTensor) and torch.equal(others.to_local(), right)
    rtp_ext.ring_of(model).close()
