"""Models that tensor or expert parallelism has sharded before the conversion: the dimension, and the style of each
module."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from rtp_ext._native import shard_sizes
from rtp_ext.convert.scopes import is_inside, state_of
from rtp_ext.families.same_forward import has_same_forward
from rtp_ext.nn import RotatedEmbedding
from rtp_ext.nn._tensor_parallel import COLWISE, ROWWISE, TensorParallelEmbedding, TensorParallelLinear
from rtp_ext.parameters.sharding import over_ranks
from rtp_ext.ring.mesh import RotationDims

GATHERED = "replicated"  # the style of modules that are gathered while in use

# Placements of weight and bias over the dimension of tensor parallelism.
_STYLES: dict[type[nn.Module], dict[Placement, tuple[str, Placement]]] = {
    nn.Linear: {Shard(0): (COLWISE, Shard(0)), Shard(1): (ROWWISE, Replicate())},
    nn.Embedding: {Shard(1): (COLWISE, Replicate()), Shard(0): (ROWWISE, Replicate())},
}


def tensor_dimensions(
    root: nn.Module, mesh: DeviceMesh, dims: RotationDims, ignored: Collection[int]
) -> dict[str, str]:
    """Returns the dimensions of `mesh` that are not in `dims` and over which parameters of a model are DTensors, each
    with the name of such a module. `ignored`: ids of parameters to leave out."""
    free = [name for name in mesh.mesh_dim_names or () if name not in dims.names]
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
    return found


def on_tensor_mesh(parameter: Any, mesh: DeviceMesh | None) -> bool:
    """Returns whether tensor parallelism over `mesh` has laid out a parameter."""
    return isinstance(parameter, DTensor) and mesh is not None and parameter.device_mesh == mesh


def is_divided(part: nn.Module, column: Sequence[int] | None) -> bool:
    """Returns whether other code has divided the experts of a module among the ranks that experts are divided among:
    all its parameters are DTensors Shard(0) over these ranks."""
    own: list[Any] = [parameter for parameter in part._parameters.values() if parameter is not None]
    return bool(own) and all(over_ranks(each, column) and each.placements == (Shard(0),) for each in own)


def _cut(part: nn.Module, mesh: DeviceMesh | None, ignored: Collection[int]) -> dict[str, Any]:
    """Returns the parameters of a module that tensor parallelism has laid out, by name."""
    return {
        key: parameter
        for key, parameter in part._parameters.items()
        if id(parameter) not in ignored and on_tensor_mesh(parameter, mesh)
    }


def style_of(part: nn.Module, mesh: DeviceMesh | None, ignored: Collection[int]) -> str | None:
    """Returns the style in which tensor parallelism over `mesh` has sharded a module; None where it has not, or in a
    style that cannot rotate."""
    cut = _cut(part, mesh, ignored)
    if not cut or _problem(part, cut) is not None:
        return None
    placements = {key: parameter.placements[0] for key, parameter in cut.items()}
    if all(placement == Replicate() for placement in placements.values()) and not _belongs_to_attention(part):
        return GATHERED
    base = next((base for base in _STYLES if has_same_forward(part, base)), None)
    own = {key for key, parameter in part._parameters.items() if parameter is not None}
    if base is not None and own == cut.keys() <= {"weight", "bias"}:
        style, bias = _STYLES[base].get(placements["weight"], (None, None))
        if style is not None and placements.get("bias", bias) == bias:
            return style
    return None


def check_style(name: str, part: nn.Module, mesh: DeviceMesh | None, ignored: Collection[int]) -> None:
    """Raises ValueError where tensor parallelism has sharded a module in a style that cannot rotate."""
    cut = _cut(part, mesh, ignored)
    if not cut or style_of(part, mesh, ignored) is not None:
        return
    placements = {key: parameter.placements[0] for key, parameter in cut.items()}
    problem = _problem(part, cut)
    raise ValueError(
        f"fully_rotate: {name or 'the model'} ({type(part).__name__}) is tensor parallel with placements {placements}"
        f"{'' if problem is None else ', but ' + problem}: expected an nn.Linear or nn.Embedding, with the forward of "
        "torch and no parameters but weight and bias, as ColwiseParallel and RowwiseParallel cut them, or parameters "
        "that are all Replicate() (SequenceParallel). Leave the module out of the plan of parallelize_module, or its "
        "parameters to the caller by ignored_params; experts that were divided so take RotationDims(expert=...)"
    )


def _problem(part: nn.Module, cut: dict[str, Any]) -> str | None:
    problems = [_empty(key, parameter) for key, parameter in cut.items()]
    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
        problems.append(RotatedEmbedding.refusal(part))
    return next((problem for problem in problems if problem is not None), None)


def _belongs_to_attention(part: nn.Module) -> bool:
    """Returns whether nn.MultiheadAttention reads the parameters of this layer itself."""
    return isinstance(part, (nn.MultiheadAttention, NonDynamicallyQuantizableLinear))


def _empty(key: str, parameter: DTensor) -> str | None:
    """Returns a message where a rank of tensor parallelism has no rows of a parameter; else None."""
    placement, ranks = parameter.placements[0], parameter.device_mesh.size()
    if isinstance(placement, Shard) and shard_sizes(parameter.shape[placement.dim], ranks)[-1] == 0:
        return f"its {key} of shape {tuple(parameter.shape)} has no part for the last of {ranks} ranks"
    return None


def parallel_class(part: nn.Module) -> type:
    """Returns the class of a rotated layer that tensor parallelism has sharded."""
    return TensorParallelEmbedding if isinstance(part, nn.Embedding) else TensorParallelLinear
