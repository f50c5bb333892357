"""save_pretrained of converted models of the transformers and peft packages: a folder that from_pretrained reads."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from rtp_ext.convert.scopes import ring_of_module
from rtp_ext.parameters.loading import whole_state
from rtp_ext.parameters.sharded_module import plain_class
from rtp_ext.ring import Ring
from rtp_ext.ring.links.agree import expect_success, in_words


def install_save_pretrained(root: nn.Module, ring: Ring) -> None:
    """Makes save_pretrained of a converted model, and of the models in it, gather sharded parameters.

    Every rank calls it; rank 0 writes, the others wait, and all raise if it fails. With a `state_dict` of whole
    tensors, as frameworks pass it, it gathers nothing, and any rank may call it alone.
    """
    if ring.mesh is None:
        return
    for part in root.modules():
        method = getattr(type(part), "save_pretrained", None)
        if method is None or "save_pretrained" in part.__dict__:
            continue
        part.__dict__["save_pretrained"] = types.MethodType(_saver(method), part)  # deepcopy binds it to the copy


def _saver(method: Any) -> Any:
    @functools.wraps(method)
    def save_pretrained(self: Any, *arguments: Any, **keywords: Any) -> None:
        bound = inspect.signature(method).bind(self, *arguments, **keywords).arguments
        given = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
        given.update(bound.get("kwargs", {}))
        state = given.get("state_dict")
        if state is not None:
            if any(isinstance(value, DTensor) for value in state.values()):
                raise ValueError(
                    f"save_pretrained of {type(self).__name__}: expected a state_dict of whole tensors, got shards: "
                    "leave it out, and call save_pretrained on every rank"
                )
            if given.get("is_main_process", True):
                _write(method, self, given)
            return
        _gather_and_write(method, self, given)

    return save_pretrained


def _gather_and_write(method: Any, model: Any, given: dict[str, Any]) -> None:
    ring = _ring_of(model)
    if ring is None:  # none of its parameters is sharded any more
        method(model, **given)
        return
    writes = dist.get_rank() == 0
    if getattr(model, "hf_quantizer", None) is not None and _names(model, given) is None:
        raise ValueError(
            f"save_pretrained of {type(model).__name__}: expected a model of the peft package, to save its adapters, "
            "got a quantized model: its configuration does not fit the values that the weights in blocks stand for"
        )
    given["state_dict"] = whole_to_save(model, writes, given)
    given["is_main_process"] = writes
    failure = None
    try:
        if writes:
            _write(method, model, given)
    except Exception as error:
        failure = error
    failures = ring.exchange(in_words(failure))
    expect_success(f"save_pretrained of {type(model).__name__}", failures, failure, raises=RuntimeError)


def whole_to_save(model: nn.Module, keep: bool, options: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Returns the tensors that save_pretrained with `options` writes for a converted model; {} on ranks without `keep`.
    Collective."""
    ring = _ring_of(model)
    if ring is not None:  # a rank that calls it alone gets a RingTimeout
        ring.exchange(type(model).__name__)
    return whole_state(model, keep, _names(model, options))


def _ring_of(model: nn.Module) -> Ring | None:
    return next((ring for part in model.modules() if (ring := ring_of_module(part)) is not None), None)


def _names(model: Any, given: Mapping[str, Any]) -> set[str] | None:
    """Returns the names of the saved parameters of a model of the peft package: its adapters. None: all parameters."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    state = model.state_dict()
    chosen: set[int] = set()
    for adapter in given.get("selected_adapters") or list(model.peft_config):
        options = {key: given[key] for key in ("save_embedding_layers",) if key in given}
        adapters = peft.get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter, **options)
        chosen.update(map(id, tree_leaves(adapters)))
    return {name for name, value in state.items() if id(value) in chosen}


def _write(method: Any, model: Any, given: dict[str, Any]) -> None:
    method(model, **given)
    plain = plain_class(model).__name__
    config: Any = getattr(model, "config", None)
    if getattr(config, "architectures", None) == [type(model).__name__] != [plain]:
        config.architectures = [plain]
        config.save_pretrained(given["save_directory"])
