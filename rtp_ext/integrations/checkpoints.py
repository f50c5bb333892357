"""What the integrations share: checkpoints of a training run, in shards, and values that all ranks start from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from rtp_ext.convert.scopes import state_of

FOLDER = "rotation"  # of a checkpoint: weights and optimizer state in shards, as torch.distributed.checkpoint writes


def is_converted(model: Any) -> bool:
    """Whether fully_rotate was called with a model."""
    return isinstance(model, nn.Module) and state_of(model) is not None


def has_shards(folder: str | os.PathLike[str]) -> bool:
    """Whether `save_shards` wrote into a folder. Raises ValueError where only some ranks see it. Collective."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (Path(folder) / FOLDER / ".metadata").is_file())
    if len(set(answers)) > 1:
        raise ValueError(
            f"expected {folder}/{FOLDER} on a file system that all ranks see, got it on ranks "
            f"{[rank for rank, found in enumerate(answers) if found]} only"
        )
    return answers[0]


def save_shards(
    folder: str | os.PathLike[str], models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Writes weights and optimizer state of converted models into FOLDER of a folder, every rank its shards.

    It loads on any number of ranks. Of models of the peft package, only what is trained. Collective.
    """
    dcp.save(_states(models, optimizers), checkpoint_id=str(Path(folder) / FOLDER))


def load_shards(
    folder: str | os.PathLike[str], models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Reads what `save_shards` wrote. Raises ValueError where there is no such thing. Collective."""
    if not has_shards(folder):
        raise ValueError(
            f"expected a checkpoint of a converted model, got {folder}, which has no folder {FOLDER!r} that is complete"
        )
    states = _states(models, optimizers)
    dcp.load(states, checkpoint_id=str(Path(folder) / FOLDER))
    pairs = _pairs(models, optimizers)
    for number, (model, several) in enumerate(pairs):
        options = StateDictOptions(strict=not _partial(model))
        if several:
            set_state_dict(
                model,
                several,
                model_state_dict=states[f"model_{number}"],
                optim_state_dict=states[f"optimizer_{number}"],
                options=options,
            )
        else:
            set_model_state_dict(model, states[f"model_{number}"], options=options)


def _states(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for number, (model, several) in enumerate(_pairs(models, optimizers)):
        options = StateDictOptions(ignore_frozen_params=_partial(model))
        if several:
            states[f"model_{number}"], states[f"optimizer_{number}"] = get_state_dict(model, several, options=options)
        else:
            states[f"model_{number}"] = get_model_state_dict(model, options=options)
    return states


def _pairs(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[nn.Module, list[torch.optim.Optimizer]]]:
    """Every model with the optimizers of its parameters."""
    pairs: list[tuple[nn.Module, list[torch.optim.Optimizer]]] = [(model, []) for model in models]
    for optimizer in optimizers:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        fits = [several for model, several in pairs if own.intersection(map(id, model.parameters()))]
        if len(fits) != 1:
            raise ValueError(
                f"{type(optimizer).__name__}: expected an optimizer of one of the models {_names(models)}, got one of "
                f"{len(fits)} of them"
            )
        fits[0].append(optimizer)
    return pairs


def _names(models: Sequence[nn.Module]) -> str:
    return ", ".join(type(model).__name__ for model in models) or "(none)"


def _partial(model: nn.Module) -> bool:
    """Whether only what is trained of a model is saved: the base of adapters is somebody else's checkpoint."""
    return hasattr(model, "peft_config")


def same_values(model: nn.Module) -> None:
    """Gives every rank the values of rank 0, where they differ, as DistributedDataParallel does. Collective over the
    default process group; of a model that has not been converted."""
    tensors = {name: tensor for name, tensor in _plain_tensors(model) if not tensor.is_meta}
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, {name: _sample(tensor) for name, tensor in tensors.items()})
    for rank, theirs in enumerate(answers):
        if list(theirs) != list(answers[0]):
            difference = sorted(theirs.keys() ^ answers[0].keys())
            raise ValueError(
                f"{type(model).__name__}: the model differs between ranks: expected the names of rank 0 in their order,"
                f" got others on rank {rank}: {', '.join(difference[:5]) or 'another order'}"
            )
    with torch.no_grad():
        for name in answers[0]:
            if any(theirs[name] != answers[0][name] for theirs in answers):
                dist.broadcast(tensors[name].data, src=0)


def _plain_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor)]


def _sample(tensor: torch.Tensor) -> tuple:
    """Shape, and a few bytes of what a tensor holds."""
    if tensor.layout != torch.strided:
        return tuple(tensor.shape), None
    part = tensor.detach()[tuple(slice(None, None, -(-extent // 8) or 1) for extent in tensor.shape)]
    return tuple(tensor.shape), part.reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()


def switch_parameters(optimizers: Sequence[Any], before: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Has optimizers that were built before the conversion go on with the parameters that took the place of theirs.

    `before`: the parameters by name. Raises ValueError for an optimizer that has a state already.
    """
    now = dict(model.named_parameters())
    replaced = {id(parameter): now[name] for name, parameter in before.items()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in replaced]
        if not held or all(replaced[id(p)] is p for p in held):
            continue
        if optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__}: expected an optimizer that has not stepped yet, got one with the state "
                f"of {len(optimizer.state)} plain parameters, which are shards now: load it after the conversion"
            )
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]
