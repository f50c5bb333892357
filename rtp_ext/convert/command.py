"""``rtp-ext explain``: the plan of a model of the transformers package, without weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from rtp_ext.command_line import read_json
from rtp_ext.convert.explain import explain

_MOST = 1 << 14  # layers or experts of a model: the meta device, too, makes each of them


def explained(config: str | Mapping[str, Any], options: argparse.Namespace) -> str:
    """Returns the plan of a configuration, of a file or a dictionary, as text or as JSON.

    Raises ImportError without the transformers package, OSError where the configuration cannot be read, and ValueError
    where it names no model, or `fully_rotate` would refuse it.
    """
    model = model_from(config, "configuration") if isinstance(config, Mapping) else model_of(config)
    if options.frozen is not None:
        model.requires_grad_(False)
    dtypes = {
        name: getattr(torch, value)
        for name in ("param_dtype", "reduce_dtype")
        if (value := getattr(options, name)) is not None
    }
    plan = explain(
        model,
        mp_policy=MixedPrecisionPolicy(**dtypes),
        in_place=options.in_place,
        bundle=not options.no_bundle,
        loss_head="fused" if options.fused_loss else None,
        frozen=options.frozen,
        route=options.route,
        gradient_route=options.gradient_route,
        gradient_travel=options.gradient_travel,
        group=options.group,
        collective=options.collective,
        transport=options.transport,
        travel=options.travel,
        ranks=options.ranks,
        rank=options.rank,
        device=options.device,
    )
    return json.dumps(plan.to_dict(), indent=2) if options.json else str(plan)


def model_of(path: str) -> nn.Module:
    """Returns the model of a configuration, on the meta device. `path`: a config.json, or its directory."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    return model_from(read_json(file, "configuration"), f"configuration {file}")


def model_from(values: Mapping[str, Any], owner: str) -> nn.Module:
    """Returns the model that a configuration of the transformers package describes, on the meta device, in its dtype.
    Raises ValueError for a configuration of anything else, ImportError without the package."""
    if "model_type" not in values:
        raise ValueError(f"{owner}: expected a configuration of the transformers package, got no model_type")
    for key, value in values.items():
        if ("layer" in key or "expert" in key) and isinstance(value, int) and value > _MOST:
            raise ValueError(f"{owner}: expected {key} of at most {_MOST}, got {value}")
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    names = values.get("architectures") or []
    cls: Any = getattr(transformers, str(names[0]), None) if names else None
    if cls is not None and not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ValueError(f"{owner}: expected the class of a model in architectures, got {names[0]!r}")
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    return model.to(config.dtype) if config.dtype is not None else model
