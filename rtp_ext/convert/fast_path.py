"""The fast path of torch.nn's transformer layers, which is turned off once their parts rotate."""

from __future__ import annotations

from torch import nn


def keep_from_fast_path(module: nn.Module) -> bool:
    """Makes an nn.TransformerEncoderLayer or nn.TransformerEncoder compute through its parts. Returns whether `module`
    is one.

    In evaluation both have a fast path, which reads the weights of their attention and linear layers directly: it would
    treat a shard as the whole weight, or mix DTensors with plain tensors. One attribute of each module enables that
    path; this function clears it. The class, the state dict and the parts stay unchanged, and copies of the module
    inherit the setting. The other transformer modules of torch.nn have no such path.

    Results are those of the plain module, except where src_key_padding_mask hides a position: an nn.TransformerEncoder
    on the fast path gives zeros there (the final norm of zeros, where it has one), as it never does in training.
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
        return True
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False
        return True
    return False
