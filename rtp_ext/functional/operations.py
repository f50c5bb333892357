"""The table of operations."""

from __future__ import annotations

from rtp_ext.functional import _selective
from rtp_ext.functional._operation import Operation
from rtp_ext.functional.convolution import Convolution
from rtp_ext.functional.cross_entropy import LinearCrossEntropy
from rtp_ext.functional.embedding import Embedding
from rtp_ext.functional.experts import Experts
from rtp_ext.functional.flyweight import Flyweight
from rtp_ext.functional.linear import Linears, PartialLinear
from rtp_ext.functional.mlp import MLP

_TABLE = (Linears, PartialLinear, Embedding, Convolution, MLP, LinearCrossEntropy, Experts, Flyweight)
OPERATIONS: dict[str, type[Operation]] = {operation.key: operation for operation in _TABLE}

_selective.register(operation.label for operation in _TABLE)
