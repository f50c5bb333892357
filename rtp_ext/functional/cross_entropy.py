"""A vocabulary head and its cross-entropy as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch

from rtp_ext import _native
from rtp_ext.functional._call import INTEGERS, Call, ShardedParameter, expect_shape
from rtp_ext.functional._driven import accumulation_dtype
from rtp_ext.functional._operation import Operation, Options, expect_features, graph_operand, rotate
from rtp_ext.parameters.frozen import expect_takes_blocks
from rtp_ext.parameters.sharding import frozen_of
from rtp_ext.ring import Prepared, Ring
from rtp_ext.words import Reduction

REDUCTIONS: tuple[str, ...] = get_args(Reduction)


class Loss(NamedTuple):
    """The settings of a cross-entropy; see `rotated_linear_cross_entropy`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    soft_cap: float | None = None
    z_loss: float = 0.0


class LinearCrossEntropy(Operation):
    """A vocabulary head and its loss. Inputs: x, targets. Settings: its shape with the settings of the loss."""

    key = "linear cross-entropy"
    label = "linear_cross_entropy"

    def __init__(
        self, options: Options, weight: torch.Tensor, bias: torch.Tensor | None, loss: Loss, transposed: bool = False
    ) -> None:
        super().__init__(options, weight, bias)
        self.loss, self.transposed = loss, transposed

    def operands(self, call: Call, inputs: Sequence[Any]) -> list[torch.Tensor]:
        x, targets = call.operand(inputs[0]), inputs[1]
        if not isinstance(targets, torch.Tensor) or targets.dtype not in INTEGERS:
            got = getattr(targets, "dtype", type(targets).__name__)
            raise TypeError(f"{call.name}: expected integer targets, got {got}")
        if targets.shape != x.shape[:-1]:
            shapes = f"{tuple(x.shape[:-1])}, got {tuple(targets.shape)}"
            raise ValueError(f"{call.name}: expected targets of shape {shapes}")
        return [call.rows(x).contiguous(), targets.reshape(-1).to(torch.int64).contiguous()]

    def prepare(self, call: Call, inputs: Sequence[torch.Tensor]) -> tuple[int, Any]:
        (weight, bias), transposed = self.given, self.transposed
        params = [ShardedParameter("weight", weight, 1 if transposed else 0, 2)]
        if bias is not None:
            params.append(ShardedParameter("bias", bias, 0, 1))
        frozen = frozen_of(weight)
        expect_takes_blocks(call.name, [frozen], transposed, call.ring.in_place)

        def derive(shapes: list[tuple[int, ...]]) -> dict[str, Any]:
            whole = shapes[0] if frozen is None else frozen.shape
            vocabulary, features = reversed(whole) if transposed else whole
            if bias is not None:
                expect_shape(call, params[1], shapes[1], (vocabulary,))
                if frozen is not None and frozen.group_rows > 1:
                    raise ValueError(
                        f"{call.name}: expected rows that fill whole blocks of {frozen.format} in a frozen weight with "
                        f"a bias, got rows of {features}"
                    )
            blocks = None if frozen is None else frozen.format
            return {"vocabulary": vocabulary, "features": features, "transposed": transposed, "frozen": blocks}

        facts = (("frozen", frozen), ("transposed", transposed))
        sizes = self.agree(call, params, inputs, facts, derive)
        settings = self.loss._asdict() | {"soft_cap": self.loss.soft_cap or 0.0}
        del settings["reduction"]
        return sizes["features"], _native.CrossEntropyShape(**sizes, bias=bias is not None, **settings)

    def check(self, call: Call, settings: tuple[int, Any], inputs: Sequence[torch.Tensor]) -> None:
        expect_features(call, inputs[0], settings[0])

    def shaped(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (loss, *_), targets = results, inputs[1]
        if self.loss.reduction == "none":
            return [loss.view(targets.shape)]
        if self.loss.reduction == "sum":
            return [loss.sum()]
        return [loss.sum() / targets.to(torch.int64).ne(self.loss.ignore_index).sum()]

    def in_graph(self, dtype: torch.dtype, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]] | None:
        x, targets = inputs
        features = self.given[0].shape[0 if self.transposed else 1]
        rows = graph_operand(x, dtype, features)
        if rows is None or targets.dtype not in INTEGERS or targets.shape != x.shape[:-1]:
            return None
        return [rows, targets.reshape(-1).to(torch.int64)], [features]

    @staticmethod
    def graph_results(rows: Any, sizes: Sequence[Any], dtype: torch.dtype) -> list[tuple[Any, torch.dtype]]:
        wide = accumulation_dtype(dtype)
        return [((rows,), wide), ((2, rows), wide)]

    @staticmethod
    def forward(call, settings, inputs, parameters):
        result = call.run(_native.cross_entropy_forward, *inputs, parameters, settings[1], call.options)
        return [result.loss, result.lse]

    @staticmethod
    def backward(call, settings, gradients, inputs, parameters, kept, needs):
        tensors = (gradients[0].contiguous(), *inputs, *kept, parameters)
        arguments = (*tensors, settings[1], needs[0], needs[2:], call.options)
        dx, *of_parameters = call.run(_native.cross_entropy_backward, *arguments)
        return dx, None, *of_parameters


def check_settings(name: str, loss: Loss) -> None:
    """Raises ValueError if a setting of the loss is out of range."""
    if loss.reduction not in REDUCTIONS:
        raise ValueError(f"{name}: expected a reduction of {', '.join(REDUCTIONS)}, got {loss.reduction!r}")
    if not 0.0 <= loss.label_smoothing <= 1.0:
        raise ValueError(f"{name}: expected label_smoothing in [0, 1], got {loss.label_smoothing}")
    if loss.soft_cap is not None and loss.soft_cap <= 0:
        raise ValueError(f"{name}: expected a positive soft_cap or None, got {loss.soft_cap}")
    if loss.z_loss < 0:
        raise ValueError(f"{name}: expected z_loss >= 0, got {loss.z_loss}")


def rotated_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ring: Ring,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    transposed: bool = False,
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_linear_cross_entropy",
) -> torch.Tensor:
    """Computes `cross_entropy(x @ W.T + b, targets)` while W travels, without a [tokens, vocabulary] tensor.

    Vocabulary shards visit every rank while an online softmax runs. Logits exist for one shard and a part of the tokens
    at a time (the smaller of a quarter of the tokens and 64 MiB; never fewer than 128 tokens), and backward recomputes
    them. The sums of the softmax are kept in float32 or wider.

        x         [..., D]   this rank's own batch, in the compute dtype
        weight    [V_r, D]   local shard, cut along the vocabulary; [D, V_r] where transposed
        bias      [V_r]      local shard
        targets   [...]      integers in [0, V), or ignore_index
        returns   scalar, or [...] where reduction is "none"; float32, float64 for float64

    Args:
        ignore_index, label_smoothing, reduction: as in torch.nn.functional.cross_entropy.
        soft_cap: logits are `soft_cap * tanh(logits / soft_cap)` (Gemma 2, arXiv 2408.00118).
        z_loss: `z_loss * logsumexp(logits) ** 2` is added for every token (PaLM, arXiv 2204.02311, section 5).

    The weight may be the parameter of a frozen one in blocks, as in `rotated_linears`; it travels in one piece. With a
    bias, its rows must fill whole blocks.

    Raises IndexError for targets out of range (on CUDA: a device assertion); everything else as in `rotated_linear`.
    Source: RTP, arXiv 2311.01635; online softmax: Milakov and Gimelshein, arXiv 1805.02867.
    """
    loss = Loss(ignore_index, label_smoothing, reduction, soft_cap, z_loss)
    check_settings(name, loss)
    options = Options(ring, prepared, compute_dtype, reduce_dtype, name)
    return rotate(LinearCrossEntropy(options, weight, bias, loss, transposed), [x, targets])[0]
