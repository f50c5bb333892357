"""``rtp-ext explain``: the plan of a model of the transformers package, without weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from rtp_ext.command_line import in_words
from rtp_ext.convert.explain import explain


def explained(options: argparse.Namespace) -> str:
    """Returns the plan, as text or as JSON.

    Raises ImportError without the transformers package, OSError where the configuration cannot be read, and ValueError
    where it names no model, or `fully_rotate` would refuse it.
    """
    model = model_of(options.hf_config)
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
    try:
        values: Any = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {in_words(error).removeprefix(f'{file}: ')}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"{file}: expected a configuration of the transformers package, got no model_type")
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    names = values.get("architectures") or []
    cls: Any = getattr(transformers, names[0], None) if names else None
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
