"""RotatedMLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rtp_ext.families.blocks import MLPSpec, mlp_block
from rtp_ext.functional._operation import rotate
from rtp_ext.functional.mlp import ACTIVATIONS, MLP, MLPParameters
from rtp_ext.nn.linear import RotatedLinear, RotatedTransposedLinear
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.registry import register
from rtp_ext.words import Activation


def mlp_operation(block: nn.Module, spec: MLPSpec, *, recompute: bool, name: str, prepared: Prepared) -> MLP:
    """Returns the operation of an MLP block of rotated layers; `down` is cut along its input features."""
    up: Any = block.get_submodule(spec.up)
    down: Any = block.get_submodule(spec.down)
    gate: Any = None if spec.gate is None else block.get_submodule(spec.gate)
    of_gate = (None, None) if gate is None else (gate.weight, gate.bias)
    shards = MLPParameters(up.weight, down.weight, of_gate[0], up.bias, down.bias, of_gate[1])
    transposed = isinstance(up, RotatedTransposedLinear)
    return MLP(up._options(name, prepared), shards, spec.activation, recompute, transposed)


def bundled_mlp(block: Any, spec: MLPSpec, x: torch.Tensor) -> torch.Tensor:
    """Returns the output of an MLP block, which is registered for graphs."""
    return rotate(block._operation(), [block.get_submodule(spec.up)._cast(x)], block)[0]


class RotatedMLP(ShardedModule, nn.Module):
    """`down(act(up(x)))`, or `down(act(gate(x)) * up(x))`, whose weights rotate as one bundle.

    Hidden slice j exists only during the step of shard j.

    Args:
        in_features, hidden_features, out_features: I, H, O; O defaults to I.
        activation: gelu, gelu_tanh, relu, silu; with a gate: swiglu, geglu, geglu_tanh, reglu.
        bias: whether all layers have a bias.
        recompute: save no hidden values for backward, but recompute them from the visiting shard.
        ring: the ranks to shard the parameters over. Collective: use the same seed on every rank.

    The layers are RotatedLinear modules named `gate_proj` (with a gate), `up_proj` and `down_proj`; `down_proj` is cut
    along its input features. Input [..., I], this rank's own batch; output [..., O]. See functional.rotated_mlp.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        recompute: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        ring: Ring,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"RotatedMLP: expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")
        gated = ACTIVATIONS[activation][1]
        options: dict[str, Any] = {"device": device, "dtype": dtype, "ring": ring}
        if gated:
            self.gate_proj = RotatedLinear(in_features, hidden_features, bias, **options)
        self.up_proj = RotatedLinear(in_features, hidden_features, bias, **options)
        out_features = in_features if out_features is None else out_features
        self.down_proj = RotatedLinear(hidden_features, out_features, bias, shard_dim=1, **options)
        self.spec = MLPSpec("up_proj", "down_proj", activation, "gate_proj" if gated else None)
        self.recompute = recompute
        self._prepared = Prepared(sharded=True)
        self._rtp_number = register(self)

    @classmethod
    def from_module(cls, module: nn.Module, ring: Ring, *, recompute: bool = False) -> RotatedMLP:
        """Returns a rotated copy of an MLP block (meta device included), which does not change.

        Supports nn.Sequential(linear, activation, linear), and blocks of models that `fully_rotate` supports if they
        are an MLP and nothing else, such as transformers' LlamaMLP and ViTMLP. Raises ValueError for any other module.
        """
        block = mlp_block(module)
        if block is None or block.kind != "forward":
            raise ValueError(
                "RotatedMLP.from_module: expected nn.Sequential(Linear, activation, Linear) or an MLP block of a known "
                f"model, got {type(module).__name__}"
            )
        twin = cls.__new__(cls)
        nn.Module.__init__(twin)
        spec, layer = block.spec, RotatedLinear.from_module
        if spec.gate is not None:
            twin.gate_proj = layer(module.get_submodule(spec.gate), ring)  # type: ignore[arg-type]
        twin.up_proj = layer(module.get_submodule(spec.up), ring)  # type: ignore[arg-type]
        down: Any = module.get_submodule(spec.down)
        twin.down_proj = layer(down, ring, shard_dim=1)
        twin.spec = MLPSpec("up_proj", "down_proj", spec.activation, spec.gate and "gate_proj")
        twin.recompute = recompute
        twin._prepared = Prepared(sharded=True)
        twin._rtp_number = register(twin)
        return twin

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return bundled_mlp(self, self.spec, input)

    def _operation(self, key: str = "") -> MLP:
        options: dict[str, Any] = {"name": "RotatedMLP", "prepared": self._prepared}
        return mlp_operation(self, self.spec, recompute=self.recompute, **options)

    def extra_repr(self) -> str:
        return f"activation={self.spec.activation}, recompute={self.recompute}"
