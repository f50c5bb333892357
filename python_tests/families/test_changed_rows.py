"""Embeddings whose forward changes the rows of nn.Embedding rotate below it; those that read their table do not."""

import copy

import torch
from harness import on_ranks
from reference import TOLERANCE, assert_same, differs, full
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import rtp_ext
from rtp_ext.nn import RotatedEmbedding

LIMIT = TOLERANCE[torch.float64]


class Scaled(nn.Embedding):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.tensor(3.3), persistent=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, ids):
        return self.norm(super().forward(ids.clamp(min=1)) * self.scale.to(self.weight.dtype)) + self.weight.shape[1]


class Reads(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + self.mean()

    def mean(self):
        return self.weight.mean(0)


class Other(nn.Embedding):
    def forward(self, ids):
        return F.one_hot(ids, self.num_embeddings).to(self.weight) @ self.weight


def _ids(rank):
    return torch.arange(8).view(2, 4) + rank


def _model(table, tied):
    torch.manual_seed(0)
    model = nn.Sequential(table(13, 6), nn.Linear(6, 13, bias=False))
    if tied:
        model[1].weight = model[0].weight
    return model


@on_ranks(3)
def test_changed_rows(rank, ranks, ring, cases):
    for table in (Scaled, Reads, Other):
        for tied in (False, True):
            with cases.case(f"{table.__name__}, tied {tied}"):
                plain = _model(table, tied).double()
                model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
                assert isinstance(model[0], RotatedEmbedding) == (table is Scaled) and isinstance(model[0], table)
                rows = {row.name: row for row in rtp_ext.explain(model).parameters}
                assert rows["0.weight"].module_class == table.__name__
                assert rtp_ext.explain(plain, mesh=ring).parameters == rtp_ext.explain(model).parameters
                for each in (model, copy.deepcopy(model)):
                    each.zero_grad(), plain.zero_grad()
                    output = each(_ids(rank))
                    assert_same(output, plain(_ids(rank)), LIMIT, "output")
                    output.square().sum().backward()
                    sum(plain(_ids(other)).square().sum() for other in range(ranks)).div(ranks).backward()
                    for key, parameter in plain.named_parameters():
                        assert_same(full(each.get_parameter(key).grad), parameter.grad, LIMIT, key)
                model.load_state_dict({key: 2 * value for key, value in plain.state_dict().items()})
                assert_same(full(model[0].weight), 2 * plain[0].weight, 0.0, "loaded")
    with cases.case("in 16 bits the scale is rounded, too"):
        plain = _model(Scaled, False)
        plain[0].norm = nn.Identity()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, mp_policy=policy)
        expected = copy.deepcopy(plain).bfloat16()[0](_ids(rank))
        plain[0].scale = torch.tensor(3.3)
        assert_same(model[0](_ids(rank)), expected, 0.0, "rows")
        other = F.embedding(_ids(rank).clamp(min=1), plain[0].weight.bfloat16()) * torch.tensor(3.3) + 6
        assert differs(other, expected, 0.0), "control: the scale in float32"
        assert model[0].weight.dtype == torch.float32
