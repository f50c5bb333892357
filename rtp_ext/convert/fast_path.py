"""What the transformer layers of torch.nn need once their parts rotate."""

from __future__ import annotations

from torch import nn


def keep_from_fast_path(module: nn.Module) -> bool:
    """Has an nn.TransformerEncoderLayer or nn.TransformerEncoder compute through its parts. Returns whether it is one.

    In evaluation both have a fast path, which reads the weights of their attention and linear layers itself: it would
    take a shard for the whole, or mix DTensors with plain tensors. Each looks at one attribute that says whether that
    path supports it; here it says no. The class, the state dict and the parts stay as they are, and copies of the
    module inherit it. The other transformer modules of torch.nn have no such path of their own.

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
