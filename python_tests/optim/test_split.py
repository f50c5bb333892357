"""The division of parameters between Muon and AdamW."""

import pytest
from hf_models import exact, make
from torch import nn

from rtp_ext.optim import matrices


def names(model):
    lists = matrices(model)
    assert sorted(map(id, [*lists[0], *lists[1]])) == sorted(map(id, model.parameters())), "each parameter once"
    return tuple([name for name, p in model.named_parameters() if any(p is each for each in some)] for some in lists)


@pytest.mark.parametrize(
    ("model", "hidden", "rest"),
    [
        (lambda: make("llama", num_hidden_layers=1), 7, {"embed_tokens.weight", "lm_head.weight", "norm.weight"}),
        (lambda: exact("tied", num_hidden_layers=1), 7, {"embed_tokens.weight", "norm.weight"}),
        (lambda: make("gpt2", n_layer=1), 4, {"wte.weight", "wpe.weight", "c_attn.bias"}),
        (lambda: make("mixtral", num_hidden_layers=1), 6, {"gate.weight", "lm_head.weight"}),
        (lambda: exact("encoder"), 9, {"embed.weight", "position", "norm1.weight", "in_proj_bias"}),
        (
            lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 3), nn.Linear(4, 9)),
            1,
            {"0.weight", "1.bias", "2.weight", "3.weight"},
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9)), 2, {"0.bias", "1.bias"}),
    ],
)
def test_hidden_matrices_and_the_rest(model, hidden, rest):
    found, others = names(model())
    assert len(found) == hidden, found
    assert all(any(name.endswith(end) for name in others) for end in rest), others
