"""RotatedMoE."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from rtp_ext.functional.dispatch import within_capacity
from rtp_ext.nn.experts import RotatedExperts
from rtp_ext.nn.linear import RotatedLinear
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.ring import Ring
from rtp_ext.ring.links.agree import agree
from rtp_ext.words import Activation, RecipeName


class RotatedMoE(ShardedModule, nn.Module):
    """A mixture-of-experts layer: a router, `top_k` experts for each token, a balance loss. Router and experts rotate.

    Args:
        hidden, inner, experts: D, H and E.
        top_k: K, the number of experts of each token.
        capacity_factor: None: no token is dropped. Else an expert takes at most C = ceil(K T capacity_factor / E) of
            the T local tokens; see below.
        activation, bias, recompute, recipe: settings of RotatedExperts. The router has no bias, and with a recipe its
            products stay wide.
        ring: the ranks to shard the parameters over. Collective: use the same seed on every rank.

    Modules: `gate`, a RotatedLinear(D, E), and `experts`, a RotatedExperts. Input [..., D], this rank's own batch;
    output [..., D]. With p = softmax(gate(x)) over the experts, in float32 or wider:

        y[t] = sum_k w[t, k] * MLP_e(x[t]),  e = e[t, k] the K experts of the largest p[t], best first
        w[t, k] = p[t, e[t, k]] / sum_j p[t, e[t, j]]  for K > 1, the convention of GShard and Mixtral
        w[t, 0] = p[t, e[t, 0]]                        for K = 1, that of Switch: a weight of 1 would not train the gate
        aux_loss = E * sum_e f_e * P_e,  f_e: the share of tokens whose first choice is e, P_e: the mean of p[:, e]

    With a capacity, experts take tokens in the order of GShard: all first choices, by position, then all second ones,
    and so on. Tokens after the first C of an expert are dropped: that expert adds nothing to them, and the weights of
    their other experts do not change. A token that all of its experts drop becomes zeros: add the layer's input to its
    output. Experts travel and tokens stay, so that a capacity does not save memory: it bounds the work of a crowded
    expert, and reproduces a model that was trained with a capacity.

    `aux_loss`, a scalar of the last forward in the dtype of p, is 1 if tokens spread evenly and at most E. Add
    `weight * layer.aux_loss` to the loss (0.01 is usual). It is the loss of the local batch; its gradient is averaged
    over the ring like all others. f_e is counted before tokens are dropped, and has no gradient. If a step calls the
    layer several times, read it after each call. It is correct under non-reentrant activation checkpointing; within a
    reentrant checkpoint it has no gradient, and reading it raises ValueError. deepcopy does not copy it.

    Sources: GShard, arXiv 2006.16668 (algorithm 1); Switch Transformers, arXiv 2101.03961 (section 2.2); RTP, arXiv
    2311.01635 (expert partition).
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int = 2,
        capacity_factor: float | None = None,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        recompute: bool = False,
        recipe: RecipeName | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        ring: Ring,
    ) -> None:
        super().__init__()
        for what, size in (("hidden", hidden), ("inner", inner), ("experts", experts)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"RotatedMoE: expected {what} to be a positive integer, got {size!r}")
        if not isinstance(top_k, int) or not 1 <= top_k <= experts:
            raise ValueError(f"RotatedMoE: expected 1 <= top_k <= {experts}, the number of experts, got {top_k!r}")
        if capacity_factor is not None and not 0.0 < capacity_factor < math.inf:
            raise ValueError(f"RotatedMoE: expected a positive capacity_factor or None, got {capacity_factor!r}")
        self.hidden, self.inner, self.num_experts = hidden, inner, experts
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self._agree(ring)
        options: dict[str, Any] = {"device": device, "dtype": dtype, "ring": ring}
        self.gate = RotatedLinear(hidden, experts, bias=False, **options)
        options |= {"activation": activation, "bias": bias, "recompute": recompute, "recipe": recipe}
        self.experts = RotatedExperts(experts, hidden, inner, **options)
        self._aux_loss: torch.Tensor | None = None
        self._lost_gradient = False

    def _agree(self, ring: Ring) -> None:
        """Compares the routing settings of all ranks: no shape depends on them, so a difference would go unnoticed."""
        agree("RotatedMoE, top_k and capacity_factor", ring, (self.top_k, self.capacity_factor))

    def __deepcopy__(self, memo: dict) -> Any:
        if self._aux_loss is not None:
            memo[id(self._aux_loss)] = None  # tensors with a graph cannot be copied
        return super().__deepcopy__(memo)

    @property
    def aux_loss(self) -> torch.Tensor | None:
        """The balance loss of the last forward, differentiable; None before the first forward."""
        if self._aux_loss is not None and self._lost_gradient and torch.is_grad_enabled():
            raise ValueError(
                "RotatedMoE: expected the last forward in training mode to record gradients, for aux_loss has none "
                "otherwise, got one under no_grad: checkpoint with use_reentrant=False, or read it under no_grad"
            )
        return self._aux_loss

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not isinstance(input, torch.Tensor) or input.dim() < 1 or input.shape[-1] != self.hidden:
            shape = tuple(input.shape) if isinstance(input, torch.Tensor) else type(input).__name__
            raise ValueError(f"RotatedMoE: expected an input of shape [..., {self.hidden}], got {shape}")
        x = input.reshape(-1, self.hidden)
        logits = self.gate(x)
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        weights, index = probabilities.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        aux_loss = _balance_loss(probabilities, index[:, 0])
        if torch._C._current_graph_task_id() == -1:  # not a recomputation in backward
            self._aux_loss = aux_loss
            self._lost_gradient = self.training and not torch.is_grad_enabled()
        if self.capacity_factor is not None:
            capacity = math.ceil(index.numel() * self.capacity_factor / self.num_experts)
            index, _ = within_capacity(index, self.num_experts, capacity)
        return self.experts(x, index, weights).view(input.shape)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, capacity_factor={self.capacity_factor}"


def _balance_loss(probabilities: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Returns E * sum_e f_e * P_e of probabilities [T, E] and first choices [T]; 0 if T = 0."""
    tokens, experts = probabilities.shape
    chosen = first.unsqueeze(-1) == torch.arange(experts, device=first.device)
    counts = chosen.sum(0).to(probabilities.dtype)
    return experts * (counts * probabilities.sum(0)).sum() / max(tokens, 1) ** 2
