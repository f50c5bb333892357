"""Rotated Tensor Parallelism for PyTorch: 1/R of the memory at data-parallel speed."""

from rtp_ext import functional, nn
from rtp_ext._native import CudaError, NcclError, RingTimeout, RotationError
from rtp_ext.convert import fully_rotate, ring_of
from rtp_ext.loading import load_safetensors
from rtp_ext.ring import Ring
from rtp_ext.sharding import init_weights

__version__ = "0.1.0"

__all__ = [
    "CudaError",
    "NcclError",
    "Ring",
    "RingTimeout",
    "RotationError",
    "fully_rotate",
    "functional",
    "init_weights",
    "load_safetensors",
    "nn",
    "ring_of",
]
