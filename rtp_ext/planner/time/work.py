"""Time of a transformer's kernels, and the work of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from rtp_ext.cost import Rates, product_seconds
from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.memory.states import padded_vocab
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy

# -- kernels: matrix products by shape, fused attention, elementwise traffic -------------------------------------------


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
    beside: bool = False,
    result_bytes: float | None = None,
) -> float:
    """Returns `rtp_ext.cost.product_seconds` at the rates of the cluster; in eight bits at least `scaled_product_s`."""
    rates = Rates(
        flops_per_s(cluster, product.element_bytes) * constants.gemm_fraction,
        cluster.hbm_bytes_per_s * constants.hbm_fraction,
        cluster.streaming_multiprocessors,
        constants.gemm_ramp_depth,
        constants.kernel_s,
    )
    seconds = product_seconds(
        rates,
        product.rows,
        product.columns,
        product.depth,
        batch=product.batch,
        element_bytes=product.element_bytes,
        result_bytes=result_bytes,
        beside=beside,
    )
    return max(seconds, constants.scaled_product_s) if product.element_bytes == 1 else seconds


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


# -- work of layers ----------------------------------------------------------------------------------------------------

_FLASH_BACKWARD = 2.5  # five products instead of two: arXiv 2307.08691
# relative to FlashAttention-2's forward, which torch calls: arXiv 2307.08691, abstract and section 4
_FLASH_BACKWARD_RATE = 63 / 73
_PLAIN_SOFTMAX_KERNELS, _PLAIN_SOFTMAX_BYTES = 4, 26  # to float32, scaled, masked, softmax, back: a score's bytes
# bytes per feature: float32 sums of the partial results of context parallelism (torch's _SDPAMerger: cast, subtract,
# multiply, subtract)
_MERGE_BYTES = 38
_ADDED, _ADDED_FUSED = 6, 2  # bytes per feature: 2 read, 1 written; compiled, another kernel reads one more
_SCALED_SUM = 10  # bytes per feature: an adapter's output is scaled (read, write) and added (2 read, write), as in peft
_EAGER_NORM = 32  # bytes per feature of RMSNorm in float32 beyond the 4 of a fused one (constants.json, eager_traffic)
_UNFUSED_KERNELS, _FUSED_KERNELS = 3, 8  # softmax and dropout of scores; norms, activation, residuals, transposes


@dataclass(frozen=True)
class Seconds:
    """Seconds of one forward and one backward, by kind. Backward excludes recomputation."""

    gemm: tuple[float, float] = (0.0, 0.0)
    attention: tuple[float, float] = (0.0, 0.0)
    elementwise: tuple[float, float] = (0.0, 0.0)
    kernels: tuple[int, int] = (0, 0)

    @property
    def forward(self) -> float:
        return self.gemm[0] + self.attention[0] + self.elementwise[0]

    @property
    def backward(self) -> float:
        return self.gemm[1] + self.attention[1] + self.elementwise[1]


def products(model: ModelSpec, strategy: Strategy, tokens: int) -> list[Product]:
    """Returns the weight products of one layer, in the order of its forward."""
    h, q, kv, t = model.hidden, model.query_features, model.kv_features, strategy.tp
    size = 1 if strategy.fp8 else strategy.param_bytes
    active = tokens * max(1, model.experts_per_token)
    experts = max(1, model.experts // strategy.ep)
    rows = -(-active // experts)
    up = (2 if model.gated else 1) * model.ffn // t
    return [
        Product("query, key, value", tokens, (q + 2 * kv) // t, h, element_bytes=size),
        Product("attention output", tokens, h, q // t, element_bytes=size),
        Product("MLP up", rows, up, h, experts, size),
        Product("MLP down", rows, h, model.ffn // t, experts, size),
    ]


def adapter_products(model: ModelSpec, strategy: Strategy, tokens: int) -> list[Product]:
    """Returns the products of the LoRA adapters of one layer: A and B of each linear layer."""
    rank, size = strategy.lora_rank, strategy.param_bytes
    pairs = [((rank, inputs), (outputs, rank)) for outputs, inputs in model.linear_shapes if rank]
    return [Product("adapter", tokens, *shape, element_bytes=size) for pair in pairs for shape in pair]


def head_product(model: ModelSpec, strategy: Strategy, tokens: int) -> Product:
    vocab = padded_vocab(model, strategy) // strategy.tp
    return Product("vocabulary head", tokens, vocab, model.hidden, element_bytes=strategy.param_bytes)


def wgrad_bytes(strategy: Strategy) -> float | None:
    """Returns the bytes that a product reads and writes for each number of a weight gradient; None: it writes a plain
    result. Those of Megatron-LM add to the float32 gradients of all micro-batches (gradient_accumulation_fusion)."""
    return 8.0 if strategy.effective_stack == "megatron" else None


def both_seconds(
    product: Product, strategy: Strategy, cluster: Cluster, constants: TimeConstants, *, trained: bool = True
) -> tuple[float, float]:
    """Returns the seconds of forward and backward. trained: whether there is a product for the weight's gradient."""
    dgrad, wgrad = product.backward()
    backward = product_s(dgrad, cluster, constants)
    if trained:
        backward += product_s(wgrad, cluster, constants, result_bytes=wgrad_bytes(strategy))
    return product_s(product, cluster, constants), backward


def fused_softmax(model: ModelSpec, strategy: Strategy) -> bool:
    """Returns whether Megatron-LM's kernel of scale, mask and softmax supports these scores: batches times heads of a
    GPU must be divisible by 4 (megatron/model/fused_softmax.py, is_kernel_available). Otherwise each runs as a separate
    kernel in float32."""
    return strategy.micro_batch * (model.heads // strategy.tp) % 4 == 0


def attention_seconds(
    model: ModelSpec, strategy: Strategy, cluster: Cluster, constants: TimeConstants
) -> tuple[float, float]:
    """Returns the time of scores, softmax and weighted sum. Balanced context parallelism shares them evenly; where each
    rank has consecutive tokens, the last has 1 - (1 - 1/c)^2 of the causal mask, 2 - 1/c times its share, and all ranks
    wait for it.

    Fused: 2 * 2 * b a s^2 d_h / 2 FLOPs (arXiv 2307.08691). Unfused: two batched products, and softmax, mask and
    dropout that read and write the scores (arXiv 2205.05198, section 4.1): 4 + 5 bytes a score.
    """
    b, s, t, c = strategy.micro_batch, model.seq, strategy.tp, strategy.cp
    if strategy.flash_attention:
        forward = 2.0 * b * model.heads * s * s * model.head_dim / (t * c)
        forward *= 1.0 if strategy.cp_balanced else 2 - 1 / c
        torch = strategy.effective_stack == "torch"
        more = _FLASH_BACKWARD / (_FLASH_BACKWARD_RATE if torch else 1.0)
        backward = flash_s(more * forward, model.head_dim, cluster, constants, torch=torch)
        return flash_s(forward, model.head_dim, cluster, constants, torch=torch), backward
    heads = b * model.heads // t
    scores = Product("scores", s // c, s, model.head_dim, heads)
    mixed = Product("weighted values", s // c, model.head_dim, s, heads)
    traffic = (9 if model.dropout else 4) * heads * s * s / c
    if not fused_softmax(model, strategy):
        traffic += _PLAIN_SOFTMAX_BYTES * heads * s * s / c
    kernels = _UNFUSED_KERNELS * constants.kernel_s
    forward = product_s(scores, cluster, constants) + product_s(mixed, cluster, constants)
    backward = sum(product_s(part, cluster, constants) for p in (scores, mixed) for part in p.backward())
    moved = traffic_s(traffic, cluster, constants)
    return forward + moved + kernels, backward + 2 * moved + kernels


def elementwise_bytes(model: ModelSpec, strategy: Strategy, tokens: int, constants: TimeConstants) -> float:
    """Returns the bytes that one layer's forward reads and writes outside of products and attention, with fused kernels
    (the tensors of arXiv 2205.05198, section 4.1, each read and written once).

    Norms 4h, residual additions 6h (7h with dropout), transposes and rotary positions 4 per projected feature,
    activation 4 or (gated) 6 per inner one; `eager_traffic` times as many on the torch stack. Eight-bit products also
    read 4 and write 2 bytes per input (its largest value first; then the value and its transpose), and twice that with
    a scale per row: rows and columns have separate scales (torchao, Float8LinearConfig "rowwise").
    """
    h, q, kv, f, t = model.hidden, model.query_features, model.kv_features, model.ffn, strategy.tp
    shared = t if strategy.sequence_parallel else 1
    hidden = 2 * (4 + (7 if model.dropout else 6)) * h / shared
    inner = max(1, model.experts_per_token) * (6 if model.gated else 4) * f / t
    moved = hidden + 4 * (q + 2 * kv) / t + inner
    if strategy.effective_stack == "torch" and not strategy.compiled:
        moved *= constants.eager_traffic
        if strategy.fused_norm and model.family == "llama":
            moved -= _EAGER_NORM * 2 * h / shared
    if strategy.effective_stack == "torch" and strategy.cp > 1:
        moved += strategy.cp * _MERGE_BYTES * q / t
    if strategy.lora_rank:
        moved += _SCALED_SUM * sum(outputs for outputs, _ in model.linear_shapes)
    if strategy.fp8:
        moved += (6 if strategy.fp8_scaling == "tensorwise" else 12) * (2 * h + q / t + f / t)
    return moved * tokens * strategy.param_bytes / 2


def scaled_weight_bytes(model: ModelSpec, strategy: Strategy) -> tuple[float, float]:
    """Returns the bytes that torchao moves in one layer's forward and backward to quantize weights, which fully_shard
    and DDP have on every rank: their largest magnitude first (2), then values (2) and codes (1), in each pass. With one
    scale, fully_shard gathers codes of float32 shards, and backward transposes them (enable_fsdp_float8_all_gather)."""
    if not strategy.fp8 or strategy.effective_stack != "torch":
        return 0.0, 0.0
    numbers = sum(outputs * inputs for outputs, inputs in model.linear_shapes) / strategy.tp
    if not gathers_codes(strategy):
        return (2 * strategy.param_bytes + 1) * numbers, (2 * strategy.param_bytes + 1) * numbers
    of_shards = (2 * 4 + 1) * numbers / strategy.shards
    return of_shards, of_shards + 2 * numbers


def gathers_codes(strategy: Strategy) -> bool:
    """Returns whether fully_shard gathers weights of layers in eight bits."""
    return strategy.fp8 and strategy.fp8_scaling == "tensorwise" and strategy.zero == 3


def added_bytes(model: ModelSpec, strategy: Strategy, tokens: int) -> float:
    """Returns the bytes that autograd moves in one layer's backward to add the input gradients of layers with the same
    input: q, k and v of a Llama, gate and up. Megatron-LM and bundles of a ring have one layer in place of each.

    Source: torch/csrc/autograd/input_buffer.cpp (one addition for each further gradient).
    """
    joined = strategy.rtp > 1 and bool(strategy.bundle) and not strategy.freezes
    if strategy.effective_stack != "torch" or joined:
        return 0.0
    adds = 2 * (model.family == "llama") + max(1, model.experts_per_token) * model.gated
    each = _ADDED_FUSED if strategy.compiled else _ADDED
    return adds * each * tokens * model.hidden * strategy.param_bytes / 2


def layer_seconds(
    model: ModelSpec, strategy: Strategy, cluster: Cluster, constants: TimeConstants, tokens: int
) -> Seconds:
    """Returns the time of one layer without its collectives. Elementwise backward moves twice the bytes of forward: it
    reads the saved tensor and the gradient, and writes a gradient (arXiv 2205.05198, section 4.1)."""
    trained = not strategy.freezes
    own = products(model, strategy, tokens)
    both = [both_seconds(product, strategy, cluster, constants, trained=trained) for product in own]
    both += [
        both_seconds(product, strategy, cluster, constants) for product in adapter_products(model, strategy, tokens)
    ]
    moved = traffic_s(elementwise_bytes(model, strategy, tokens, constants), cluster, constants)
    added = traffic_s(added_bytes(model, strategy, tokens), cluster, constants)
    codes = [traffic_s(size, cluster, constants) for size in scaled_weight_bytes(model, strategy)]
    kernels = _FUSED_KERNELS * constants.kernel_s
    softmax = strategy.flash_attention or fused_softmax(model, strategy)
    return Seconds(
        (sum(pair[0] for pair in both), sum(pair[1] for pair in both)),
        attention_seconds(model, strategy, cluster, constants),
        (moved + codes[0] + kernels, 2 * moved + added + codes[1] + kernels),
        _kernels(strategy, len(both), 0 if softmax else _PLAIN_SOFTMAX_KERNELS),
    )


def _kernels(strategy: Strategy, products: int, more: int) -> tuple[int, int]:
    """Returns the number of kernels that the host issues for one layer, forward and backward: products, attention,
    elementwise kernels, collectives."""
    collectives = 2 * (strategy.tp > 1) * (1 + strategy.sequence_parallel) + 4 * (strategy.ep > 1) + (strategy.cp > 1)
    attention = (1, 1) if strategy.flash_attention else (2 + _UNFUSED_KERNELS, 4 + _UNFUSED_KERNELS)
    more += _FUSED_KERNELS + collectives
    return products + attention[0] + more, 2 * products + attention[1] + more


def head_seconds(
    model: ModelSpec, strategy: Strategy, cluster: Cluster, constants: TimeConstants, tokens: int
) -> Seconds:
    """Returns the time of vocabulary head and loss: the product, and float32 logits that the loss reads and writes (12
    and 6 bytes).

    Source: Megatron-LM's vocabulary-parallel cross entropy (arXiv 1909.08053, section 3).
    """
    logits = tokens * padded_vocab(model, strategy) / strategy.tp
    loss = (traffic_s(12 * logits, cluster, constants), traffic_s(6 * logits, cluster, constants))
    product, trained = head_product(model, strategy, tokens), not strategy.freezes
    return Seconds(gemm=both_seconds(product, strategy, cluster, constants, trained=trained), elementwise=loss)
