"""Models that tensor parallelism has cut before they are converted: over which dimension, and how each module."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from rtp_ext._native import shard_sizes
from rtp_ext.convert.scopes import is_inside, state_of
from rtp_ext.families.layers import computes_like
from rtp_ext.nn import RotatedEmbedding
from rtp_ext.nn._tensor_parallel import COLWISE, ROWWISE, TensorParallelEmbedding, TensorParallelLinear
from rtp_ext.ring import Ring
from rtp_ext.ring.mesh import RingMesh, RotationDims

GATHERED = "replicated"  # the style of modules that are gathered while in use

# how weight and bias lie over the dimension of tensor parallelism
_STYLES: dict[type[nn.Module], dict[Placement, tuple[str, Placement]]] = {
    nn.Linear: {Shard(0): (COLWISE, Shard(0)), Shard(1): (ROWWISE, Replicate())},
    nn.Embedding: {Shard(1): (COLWISE, Replicate()), Shard(0): (ROWWISE, Replicate())},
}


def tensor_dimension(root: nn.Module, mesh: Any, dims: RotationDims | None, ignored: Collection[int]) -> str | None:
    """The name of the dimension of `mesh` over which the parameters of a model are DTensors; None where they are plain,
    or on no dimension of it that `dims` leaves. `ignored`: ids of parameters that do not count.

    Raises ValueError where they lie on several.
    """
    if not isinstance(mesh, DeviceMesh) or not isinstance(dims, RotationDims):
        return None
    free = [name for name in mesh.mesh_dim_names or () if name not in dims.ring_names + dims.replicate_names]
    found: dict[str, str] = {}
    for name, part in root.named_modules():
        state = state_of(part)
        meshes = [] if state is None else [state.ring.tensor_mesh]
        if not is_inside(part):
            meshes += [
                parameter.device_mesh
                for parameter in part._parameters.values()
                if isinstance(parameter, DTensor) and id(parameter) not in ignored
            ]
        for theirs in meshes:
            for dimension in free:
                if theirs is not None and theirs == mesh[dimension]:
                    found.setdefault(dimension, name or type(part).__name__)
    if len(found) > 1:
        where = ", ".join(f"{dimension} ({name})" for dimension, name in found.items())
        raise ValueError(f"fully_rotate: expected tensor parallelism over one dimension of the mesh, got {where}")
    return next(iter(found), None)


def on_tensor_mesh(parameter: DTensor, where: Ring | RingMesh) -> bool:
    """Whether tensor parallelism has cut a parameter over the dimension that a ring or mesh knows of."""
    mesh = where.tensor_mesh if isinstance(where, Ring) else where.tensor
    return mesh is not None and parameter.device_mesh == mesh


def style_of(name: str, part: nn.Module, where: Ring | RingMesh, ignored: Collection[int]) -> str | None:
    """How tensor parallelism has cut a module; None where it has not. Raises ValueError for what cannot rotate."""
    own = {key: parameter for key, parameter in part._parameters.items() if parameter is not None}
    cut: dict[str, Any] = {
        key: parameter
        for key, parameter in own.items()
        if isinstance(parameter, DTensor) and id(parameter) not in ignored and on_tensor_mesh(parameter, where)
    }
    if not cut:
        return None
    placements = {key: parameter.placements[0] for key, parameter in cut.items()}
    problems = [_empty(key, parameter) for key, parameter in cut.items()]
    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
        problems.append(RotatedEmbedding.refusal(part))
    problem = next((problem for problem in problems if problem is not None), None)
    whole = all(placement == Replicate() for placement in placements.values())
    if problem is None and whole and not _belongs_to_attention(part):
        return GATHERED
    base = next((base for base in _STYLES if computes_like(part, base)), None)
    if problem is None and base is not None and own.keys() == cut.keys() <= {"weight", "bias"}:
        style, bias = _STYLES[base].get(placements["weight"], (None, None))
        if style is not None and placements.get("bias", bias) == bias:
            return style
    raise ValueError(
        f"fully_rotate: {name or 'the model'} ({type(part).__name__}) is tensor parallel with placements {placements}"
        f"{'' if problem is None else ', but ' + problem}: expected an nn.Linear or nn.Embedding, with the forward of "
        "torch and no parameters but weight and bias, as ColwiseParallel and RowwiseParallel cut them, or parameters "
        "that are all Replicate() (SequenceParallel). Leave the module out of the plan of parallelize_module, or its "
        "parameters to the caller by ignored_params"
    )


def _belongs_to_attention(part: nn.Module) -> bool:
    """Whether nn.MultiheadAttention reads the parameters of this layer itself."""
    return isinstance(part, (nn.MultiheadAttention, NonDynamicallyQuantizableLinear))


def _empty(key: str, parameter: DTensor) -> str | None:
    """Says so where a rank of tensor parallelism has nothing of a parameter."""
    placement, ranks = parameter.placements[0], parameter.device_mesh.size()
    if isinstance(placement, Shard) and shard_sizes(parameter.shape[placement.dim], ranks)[-1] == 0:
        return f"its {key} of shape {tuple(parameter.shape)} has no part for the last of {ranks} ranks"
    return None


def parallel_class(part: nn.Module) -> type:
    """What a rotated layer becomes that tensor parallelism has cut."""
    return TensorParallelEmbedding if isinstance(part, nn.Embedding) else TensorParallelLinear
