"""torch.compile of models with products in 8 bits: against the same layers in one process."""

import torch
from code_reference import scaled
from graph_cases import in_graphs
from harness import on_ranks
from reference import assert_same, full
from test_recipe import TOLERANCE, batch, make, train, train_plain, wide_layers

import rtp_ext


@in_graphs
@on_ranks(2, timeout=600.0)
def test_graphs(rank, ranks, cases):
    """One graph, with the results of eager calls, also of the step after an update."""
    for name in ("float8_rowwise", "float8_tensorwise", "mxfp8"):
        torch._dynamo.reset()
        plain = train_plain(scaled(make(), name, ranks, wide_layers(name, ranks)), ranks, 2)
        with cases.case(name):
            model = rtp_ext.fully_rotate(make(), recipe=name, timeout=60.0)
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            train(compiled, rank, 2)
            wholes = [full(parameter) for parameter in model.parameters()]
            for whole, expected in zip(wholes, plain.parameters(), strict=True):
                assert_same(whole, expected, TOLERANCE, "parameters")
            with torch.no_grad():
                assert_same(compiled(batch(rank, 90)), plain(batch(rank, 90)), TOLERANCE, "compiled")
            rtp_ext.ring_of(model).close()
