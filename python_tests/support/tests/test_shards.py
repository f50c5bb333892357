"""The tests' replacement of DTensor's rules of copies gives the same results as the rules."""

from itertools import product

import torch
from harness import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard

PLACEMENTS = (Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), Partial(), Partial("avg"))
ATEN = torch.ops.aten
LIKE = (ATEN.zeros_like.default, ATEN.ones_like.default, ATEN.empty_like.default)


def _kept(spec):
    """Calls whose results have the placements of `spec`, and whether ours asks torch's rule."""
    partial = any(placement.is_partial() for placement in spec.placements)
    yield OpSchema(ATEN.detach.default, (spec,), {}), False
    for op in LIKE:
        yield OpSchema(op, (spec,), {"memory_format": torch.preserve_format}), partial
    yield OpSchema(ATEN.full_like.default, (spec, 2.0), {}), partial
    yield OpSchema(ATEN.copy_.default, (spec, spec), {}), partial


def _others(spec):
    """Calls whose results differ from `spec`."""
    whole = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    yield OpSchema(ATEN.t.default, (spec,), {})
    yield OpSchema(ATEN.zeros_like.default, (spec,), {"dtype": torch.float64})
    yield OpSchema(ATEN.zeros_like.default, (spec,), {"memory_format": torch.contiguous_format})
    if spec != whole:
        yield OpSchema(ATEN.copy_.default, (spec, whole), {})


@on_ranks(2)
def test_what_copies_give(cases):
    propagator = DTensor._op_dispatcher.sharding_propagator
    ours = type(propagator).propagate_op_sharding_non_cached
    torch_says = ours.__wrapped__
    for shape in ((2,), (1, 2)):
        mesh = init_device_mesh("cpu", shape)
        for number, placements in enumerate(product(PLACEMENTS, repeat=mesh.ndim)):
            stride = ((5, 1), (1, 7))[(number + number // len(PLACEMENTS)) % 2]
            meta = TensorMeta(torch.Size([7, 5]), stride, torch.bfloat16)
            spec = DTensorSpec(mesh, placements, tensor_meta=meta)
            for schema, asked in _kept(spec):
                with cases.case(f"{schema.op} of {placements} {meta}"):
                    expected, found = torch_says(propagator, schema), ours(propagator, schema)
                    assert (found.output_spec is spec) == (not asked) and expected.output_spec is not spec
                    assert found == expected and found.output_spec.tensor_meta == expected.output_spec.tensor_meta
                    assert found.output_spec.shard_order == expected.output_spec.shard_order
                    assert asked or found.output_spec.tensor_meta == meta
            for schema in _others(spec):
                with cases.case(f"control: {schema.op} of {placements}, with {schema.kwargs_schema}, is torch's own"):
                    expected, found = torch_says(propagator, schema), ours(propagator, schema)
                    assert found == expected and found.output_spec is not spec
                    assert found.output_spec.tensor_meta == expected.output_spec.tensor_meta
