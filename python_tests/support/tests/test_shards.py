"""The tests' replacement of DTensor's rule of `detach` gives the same results as the rule."""

from itertools import product

import torch
from harness import Cases, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard

PLACEMENTS = (Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), Partial(), Partial("avg"))


def _rules(rank, ranks):
    cases = Cases()
    propagator = DTensor._op_dispatcher.sharding_propagator
    ours = type(propagator).propagate_op_sharding_non_cached
    torch_says = ours.__wrapped__
    for shape in ((2,), (1, 2)):
        mesh = init_device_mesh("cpu", shape)
        for number, placements in enumerate(product(PLACEMENTS, repeat=mesh.ndim)):
            stride = ((5, 1), (1, 7))[(number + number // len(PLACEMENTS)) % 2]
            meta = TensorMeta(torch.Size([7, 5]), stride, torch.bfloat16)
            spec = DTensorSpec(mesh, placements, tensor_meta=meta)
            with cases.case(f"{placements} of {meta}"):
                schema = OpSchema(torch.ops.aten.detach.default, (spec,), {})
                expected, found = torch_says(propagator, schema), ours(propagator, schema)
                assert found.output_spec is spec is not expected.output_spec, "torch's own rule was asked"
                assert found == expected and found.output_spec.tensor_meta == meta == expected.output_spec.tensor_meta
                assert found.output_spec.shard_order == expected.output_spec.shard_order
        with cases.case(f"control: {placements}, transposed, is not what it was, and torch's own"):
            schema = OpSchema(torch.ops.aten.t.default, (spec,), {})
            expected, found = torch_says(propagator, schema), ours(propagator, schema)
            assert found == expected and found.output_spec.tensor_meta != meta
    cases.finish()


def test_what_detach_gives():
    run_ranks(_rules, 2)
