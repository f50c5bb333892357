"""Loading of whole tensors into shards, and the whole state dict of a converted model."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rtp_ext._native import shard_sizes
from rtp_ext.command_line import read_json
from rtp_ext.parameters.frozen import gather_plain, load_plain
from rtp_ext.parameters.sharded_module import end_left_forwards
from rtp_ext.parameters.sharding import frozen_of

logger = logging.getLogger("rtp_ext")

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_EXTRA_STATE = "_extra_state"  # torch's name for it in a state_dict


def load_safetensors(module: nn.Module, files: Files, *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Loads a checkpoint of the plain model into a converted one, in place.

    Every rank reads only the slices of its own shards: it maps files into memory, and copies each slice into the
    parameter, converted to the parameter's dtype, or to the blocks of a frozen weight. Besides the model this takes no
    memory on CPUs, and that of one slice on GPUs; for weights in blocks, that of a part of a slice. Buffers and
    unsharded parameters are read whole. All names, shapes and dtypes are checked before the first write.

    Args:
        module: a model converted by `fully_rotate` (or any other), with storage: call `to_empty` on a model on the meta
            device first. Buffers that are not in its state_dict (such as rotary frequencies) do not change and are
            named in the log; after `to_empty` their values are undefined until `init_weights` or the caller sets them.
        files: a .safetensors file, several of them, an index (model.safetensors.index.json), or a directory. In a
            directory, the index is used if there is one, else model.safetensors, else all .safetensors files.
            An index may name files of its own folder only; those may be links (as in the cache of huggingface_hub).
            Names are those of the plain model's state_dict; one name of tied parameters is enough.
        strict: whether names that are missing from the files, or that the model does not have, are an error.

    Returns the missing and the unexpected names, as load_state_dict does; both are empty if strict.

    Raises ValueError for missing or unexpected names (if strict), for a wrong shape or dtype (with the parameter,
    expected and actual), for infinities and NaNs in this rank's part of a frozen weight in blocks (after the check:
    earlier tensors are loaded, and other ranks may load all), for files that contradict each other or cannot be read,
    for an index that names anything but files in its folder; TypeError for `files` that are not paths;
    FileNotFoundError; ImportError if safetensors is not installed. Not collective: every rank reads independently.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"load_safetensors: expected a torch.nn.Module, got {type(module).__name__}")
    state = module.state_dict(keep_vars=True)
    # the result of get_extra_state is a value that cannot be written to
    targets = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA_STATE
    }
    located = _locate(files)
    found = {id(targets[name]) for name in targets if name in located}
    missing = [name for name in state if name not in located and id(state[name]) not in found]
    unexpected = [name for name in located if name not in targets]
    if strict and (missing or unexpected):
        raise ValueError(
            f"load_safetensors: {type(module).__name__} and the files do not fit: expected all of its "
            f"{len(state)} names and no other; missing: {_some(missing)}; unexpected: {_some(unexpected)}"
        )
    wanted: dict[Path, list[str]] = {}
    for name in targets:
        if name in located:
            wanted.setdefault(located[name], []).append(name)
    for path, names in wanted.items():
        with _open(path) as file:
            for name in names:
                _check(file, path, name, targets[name])
    end_left_forwards(module)
    with torch.no_grad():
        for path, names in wanted.items():
            with _open(path) as file:
                for name in names:
                    _copy(file, name, targets[name])
    logger.info("load_safetensors: %d tensors of %d files", sum(map(len, wanted.values())), len(wanted))
    kept = {id(value) for value in state.values()}
    if others := [name for name, buffer in module.named_buffers() if id(buffer) not in kept]:
        logger.info("load_safetensors: in no checkpoint, left as they are: buffers %s", _some(others))
    return missing, unexpected


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return (", ".join(names[:20]) or "none") + more


def _locate(files: Files) -> dict[str, Path]:
    """Returns the file of every name."""
    paths = _paths(files)
    located: dict[str, Path] = {}
    for path in paths:
        for name, holder in _names_of(path).items():
            if name in located:
                raise ValueError(
                    f"load_safetensors: expected {name} in one of the files, got it in {located[name]} and {holder}"
                )
            located[name] = holder
    if not located:
        raise ValueError(f"load_safetensors: expected files with tensors, got none in {_some(list(map(str, paths)))}")
    return located


def _paths(files: Files) -> list[Path]:
    several = [files] if isinstance(files, (str, os.PathLike)) or not isinstance(files, Iterable) else list(files)
    for file in several:
        if not isinstance(file, (str, os.PathLike)):
            raise TypeError(f"load_safetensors: expected a path or several as files, got {file!r:.100}")
    return [Path(file) for file in several]


def _names_of(path: Path) -> dict[str, Path]:
    if path.is_dir():
        for known in (_INDEX, _WHOLE):
            if (path / known).exists():
                return _names_of(path / known)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"load_safetensors: expected .safetensors files in {path}, got none")
        return _locate(files)
    if path.suffix == ".json":
        return _names_of_index(path)
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _names_of_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = read_json(path, "index")["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"load_safetensors: expected an index with a weight_map, got {path}: {error!r}") from error
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"load_safetensors: expected a weight_map from names to files in {path}, got {weight_map!r:.100}"
        )
    located = {name: _inside(path, name, file) for name, file in weight_map.items()}
    for holder in sorted(set(located.values())):
        with _open(holder) as file:
            held = set(file.keys())
        lacking = [name for name, where in located.items() if where == holder and name not in held]
        if lacking:
            raise ValueError(f"load_safetensors: expected {_some(lacking)} in {holder}, as {path} says; it is not")
    return located


def _inside(index: Path, name: str, file: object) -> Path:
    """Returns the path of a file that an index names. Checks the name only: a file of the folder may be a link."""
    if not isinstance(file, str):
        raise ValueError(f"load_safetensors: {name}: expected the name of a file in {index}, got {file!r:.100}")
    if os.path.isabs(file) or ".." in Path(file).parts or not Path(file).parts:
        raise ValueError(f"load_safetensors: {name}: expected a file in {index.parent}, got {file!r} in {index.name}")
    return index.parent / file


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("load_safetensors needs the package safetensors: pip install 'rtp-ext[hf]'") from error
    if not path.is_file():
        raise FileNotFoundError(f"load_safetensors: expected a file or a directory, got {path}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"load_safetensors: expected a safetensors file, got {path}: {error}") from error


def _check(file: Any, path: Path, name: str, target: torch.Tensor) -> None:
    """Raises ValueError if the parameter cannot be loaded from the file. Reads the header only."""
    if target.device.type == "meta":
        raise ValueError(f"load_safetensors: {name} is on the meta device; call to_empty first")
    entry = file.get_slice(name)
    shape = tuple(entry.get_shape())
    frozen = frozen_of(target)
    expected, stored = (tuple(target.shape), target.dtype) if frozen is None else (frozen.shape, frozen.dtype)
    if shape != expected:
        raise ValueError(f"load_safetensors: {name}: expected shape {expected}, got {shape} in {path}")
    dtype = (entry[:0] if shape else file.get_tensor(name)).dtype
    if not torch.can_cast(dtype, stored) or (frozen is not None and not dtype.is_floating_point):
        raise ValueError(f"load_safetensors: {name}: expected {stored}, got {dtype} in {path}")
    _part(name, target)


def _copy(file: Any, name: str, target: torch.Tensor) -> None:
    local = target.to_local() if isinstance(target, DTensor) else target
    if frozen_of(target) is not None:
        try:
            load_plain(target, file.get_slice(name))  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"load_safetensors: {name}: {error}") from error
    elif target.dim() == 0:
        local.copy_(file.get_tensor(name))
    elif local.numel() > 0:
        local.copy_(file.get_slice(name)[_part(name, target)])


def _part(name: str, target: torch.Tensor) -> tuple[slice, ...]:
    """Returns the slices of this rank's part of a parameter."""
    part = [slice(0, extent) for extent in target.shape]
    if not isinstance(target, DTensor):
        return tuple(part)
    mesh = target.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(f"load_safetensors: {name} is sharded over {mesh}, which this rank is not part of")
    cuts = list(zip(target.placements, place, mesh.shape, strict=True))
    cuts = sorted(cuts, key=lambda cut: isinstance(cut[0], _StridedShard))  # a _StridedShard cuts last
    for placement, coordinate, ranks in cuts:
        if isinstance(placement, (Shard, _StridedShard)):
            whole = part[placement.dim]
            sizes = shard_sizes(whole.stop - whole.start, ranks)
            start = whole.start + sum(sizes[:coordinate])
            part[placement.dim] = slice(start, start + sizes[coordinate])
        elif type(placement) is not Replicate:
            raise ValueError(f"load_safetensors: {name}: expected Shard or Replicate, got {target.placements}")
    return tuple(part)


# -- the whole state dict ----------------------------------------------------------------------------------------------


def whole_state(module: nn.Module, keep: bool, names: Collection[str] | None = None) -> dict[str, Any]:
    """Returns the plain model's state_dict on the CPU if `keep`, else {}.

    Frozen weights in blocks are dequantized. Tied tensors share their memory. Parameters are gathered one at a time,
    and ranks without `keep` hold none of them. names: entries to return; None: all. Collective: every rank of the mesh
    passes the same names.
    """
    state = module.state_dict(keep_vars=True)
    found: dict[str, Any] = {}
    gathered: dict[int, torch.Tensor] = {}  # by id of the parameter
    for name, value in state.items():
        if names is not None and name not in names:
            continue
        if isinstance(value, DTensor):
            if id(value) not in gathered:
                gathered[id(value)] = gather_plain(value, keep=keep)
            value = gathered[id(value)]
        elif isinstance(value, torch.Tensor):
            value = value.detach().cpu()
        found[name] = value
    return found if keep else {}
