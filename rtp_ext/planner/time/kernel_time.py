"""Time of a transformer's kernels: matrix products by shape, fused attention, elementwise traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.native import engine
from rtp_ext.planner.specs.cluster import Cluster


@dataclass(frozen=True)
class Product:
    """`batch` products [rows, depth] x [depth, columns]. Backward consists of two products."""

    what: str
    rows: int
    columns: int
    depth: int
    batch: int = 1
    element_bytes: int = 2  # of a value that the GEMM reads; 1: eight-bit products
    weight: bool = True

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.depth

    def backward(self) -> tuple[Product, Product]:
        """Products of the gradients of the first and of the second factor."""
        m, n, k = self.rows, self.columns, self.depth
        own = (self.batch, self.element_bytes, self.weight)
        return Product(f"{self.what}, dgrad", m, k, n, *own), Product(f"{self.what}, wgrad", n, k, m, *own)


def flops_per_s(cluster: Cluster, element_bytes: int) -> float:
    """Returns the highest FLOP/s that a GEMM of the element size reaches."""
    if element_bytes == 1:
        if not cluster.fp8_achievable_flops_per_s:
            raise ValueError(f"cluster {cluster.name}: expected fp8_achievable_flops_per_s for fp8, got none")
        return cluster.fp8_achievable_flops_per_s
    return cluster.bf16_achievable_flops_per_s if element_bytes == 2 else cluster.bf16_achievable_flops_per_s / 2


def product_s(
    product: Product,
    cluster: Cluster,
    constants: TimeConstants,
    *,
    whole_waves: bool = True,
    result_bytes: float | None = None,
) -> float:
    """Returns the time of the waves of output tiles over the multiprocessors, or of the bytes if that is longer.

    waves * SMs * 2 * tile * (depth + ramp) / rate, for the better of two tiles. Without `whole_waves`, other kernels
    fill the multiprocessors that the last wave leaves idle. result_bytes: bytes read and written for each number of the
    result; default: one write of 2 bytes, or of as many as an operand has. Source: NVIDIA, Matrix Multiplication
    Background User's Guide (tile and wave quantization); roofline: Williams et al., CACM 52(4), 2009.
    """
    m, n, k, batch = product.rows, product.columns, product.depth, product.batch
    if not (m and n and k):
        return 0.0
    sms = cluster.streaming_multiprocessors
    rate = flops_per_s(cluster, product.element_bytes) * constants.gemm_fraction
    depth = k + constants.gemm_ramp_depth
    least = math.inf
    for tile, (rows, columns) in enumerate(engine().GEMM_TILES):
        waves = engine().waves(m, n, sms, tile, batch)
        least = min(least, (math.ceil(waves) if whole_waves else waves) * rows * columns)
    busy = least * sms * 2.0 * depth
    if result_bytes is None:
        result_bytes = max(2, product.element_bytes)
    moved = batch * (product.element_bytes * (m * k + k * n) + result_bytes * m * n)
    return max(busy / rate, traffic_s(moved, cluster, constants)) + constants.kernel_s


def traffic_s(size_bytes: float, cluster: Cluster, constants: TimeConstants) -> float:
    """Returns bytes read and written over memory bandwidth (roofline: Williams et al., CACM 52(4), 2009)."""
    return size_bytes / (cluster.hbm_bytes_per_s * constants.hbm_fraction)


def flash_s(flops: float, head_dim: int, cluster: Cluster, constants: TimeConstants, *, torch: bool) -> float:
    """Returns the time of fused attention without the masked half.

    Its products run at the rate of GEMMs, followed by one exponential per 4 head_dim FLOPs (Shah et al., arXiv
    2407.08608, section 3.1: products wait for exponentials; backward's share grows with its number of products). On
    torch, at a fraction of the GEMM rate (section 1 there).
    """
    rate = cluster.bf16_achievable_flops_per_s
    if torch:
        return flops / (rate * constants.flash_fraction_torch) + constants.kernel_s
    exponentials = flops / (4 * head_dim) / cluster.exponentials_per_s if cluster.exponentials_per_s else 0.0
    return flops / rate + exponentials + constants.kernel_s
