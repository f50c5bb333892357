"""The words that options take, a type for each set. Checks of options read them from here by typing.get_args."""

from __future__ import annotations

from typing import Literal

#: `transport` of Ring and fully_rotate
Transport = Literal["auto", "shm", "shm+tcp", "shm+c10d", "tcp", "c10d", "ce", "ce+nccl", "nccl+nccl", "nccl"]
#: `transport` of rotate_for_inference
InferenceTransport = Literal["auto", "shm", "shm+tcp", "tcp", "ce"]
#: `route` of one pass, and of an emulated ring
PassRoute = Literal["ring", "direct", "gather", "two-level"]
#: `route` of Ring and fully_rotate
Route = Literal["auto", PassRoute]
#: `gradient_route` of one pass, and of an emulated ring
PassGradientRoute = Literal["chain", "direct"]
#: `gradient_route` of Ring and fully_rotate
GradientRoute = Literal["auto", PassGradientRoute]
#: `travel`, or None
Travel = Literal["bfloat16", "int8"]
#: `gradient_travel`, or None
GradientTravel = Literal["int8"]
#: `embedding` of Ring
EmbeddingWay = Literal["auto", "rotate", "rows"]
#: `graphs` of Ring
Graphs = Literal["auto", "on", "off"]
#: `buffers` of Ring, or bytes
Budget = Literal["auto", "lean"]
#: `ce_mode` of the transport options
CeMode = Literal["auto", "push", "pull"]
#: what hops carry
Channel = Literal["weight", "gradient"]
#: buffers that a ring counts
Buffers = Literal[Channel, "scratch"]

#: `bundle` of fully_rotate, or a bool
Bundle = Literal["recompute"]
#: `loss_head` of fully_rotate, or None
LossHead = Literal["fused"]
#: `frozen` of fully_rotate and `weights` of rotate_for_inference, or None
Format = Literal["nf4", "mxfp4", "int8"]

#: `recipe` of fully_rotate, rotated_linear and rotated_experts, or None
RecipeName = Literal[
    "float8_tensorwise",
    "float8_tensorwise_whole",
    "float8_rowwise",
    "float8_rowwise_with_gw_hp",
    "float8_blockwise",
    "mxfp8",
    "mxfp8_rceil",
]

#: `activation` of MLPs, and of experts that have parameters
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh", "reglu"]
#: `activation` of rotated_experts
ExpertActivation = Literal[Activation, "clamped_swiglu"]
#: `reduction` of losses
Reduction = Literal["none", "mean", "sum"]
#: `combine` of Flyweight
Combine = Literal["cat", "sum"]
#: `padding` of convolutions, or integers
Padding = Literal["same", "valid"]
#: `padding_mode` of convolutions
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]

#: `exchange` of Muon
Exchange = Literal["auto", "gram", "whole"]
#: `adjust_lr_fn` of Muon, or None; of torch.optim.Muon
LearningRateAdjustment = Literal["original", "match_rms_adamw", "spectral_unclamped"]

#: `topology` of Gossip
Topology = Literal["one-peer", "exponential", "ring", "grid", "complete"]
