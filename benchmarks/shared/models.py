"""Models of the benchmarks. Each has `blocks` (what `fully_shard` wraps) and `forward(inputs, targets) -> loss`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rtp_ext.parameters.frozen import FrozenWeight

BYTES = 256


class Block(nn.Module):
    """Pre-norm transformer block with causal self-attention and a four times wider GELU MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, seq, hidden] -> [batch, seq, hidden]."""
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """A language model like GPT-2: learned positions, pre-norm blocks, output weights tied to the token embedding.

    Tokens are bytes unless there is a `vocabulary`.
    """

    def __init__(self, *, seq: int, layers: int, hidden: int, heads: int, vocabulary: int = BYTES) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden size {hidden} is not divisible by {heads} heads")
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """inputs, targets int64 [batch, seq] -> mean cross-entropy in nats per token, float32 or wider, scalar."""
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class MLPBlock(nn.Module):
    """x + Linear(GELU(Linear(LayerNorm(x))))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, width] -> [tokens, width]."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MLPStack(nn.Module):
    """Residual MLP blocks with a mean squared error: little but GEMMs, so what a strategy costs is plain to see."""

    def __init__(self, *, blocks: int = 4, width: int = 1024, inner: int = 4096) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock(width, inner) for _ in range(blocks))

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Tensor parallelism: inner features cut, activations between blocks whole."""
        for block in self.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """inputs, targets [tokens, width] -> mean squared error, scalar."""
        x = inputs
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x.to(targets.dtype), targets)


class Llama(nn.Module):
    """A Llama of the transformers package with random weights, as a language model with a loss. recompute: backward
    computes its blocks again."""

    causal_head = True

    def __init__(
        self, *, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, recompute: int = 0
    ) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=inner,
            vocab_size=vocabulary,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)
        self.computes_again = bool(recompute)
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.model.layers

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Tensor parallelism: heads and hidden features cut, activations between blocks whole, logits gathered."""
        block = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        block |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        block |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        for layer in self.blocks:
            parallelize_module(layer, mesh, block)
        ends = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self.model, mesh, ends)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """inputs, targets int64 [batch, seq] -> mean cross-entropy in nats per token, float32 or wider, scalar."""
        return self.model(input_ids=inputs, labels=targets, shift_labels=targets).loss


def with_adapters(model: Llama, rank: int) -> Llama:
    """Puts LoRA adapters of PEFT around all linear layers of the blocks, and freezes the rest, in place.

    Weights of all linear layers are rounded to values of nf4, so that a model whose weights are kept in nf4 computes
    with the same ones. `B` of an adapter is not zero, which would make the first gradient of `A` zero.
    """
    import peft

    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = FrozenWeight("nf4", tuple(module.weight.shape), module.weight.dtype)
            values = module.weight.detach()
            values.copy_(weight.decode(weight.encode(values, weight.packed_shape[0])))
    config = peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    peft.inject_adapter_in_model(config, model.model)
    return model


def random_vectors(tokens: int, generator: torch.Generator, width: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for MLPStack, float32 [tokens, width] each."""
    return torch.randn(tokens, width, generator=generator), torch.randn(tokens, width, generator=generator)


def random_tokens(
    tokens: int, generator: torch.Generator, seq: int = 128, vocabulary: int = BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for a language model, int64 [tokens / seq, seq] each.

    Raises:
        ValueError: `tokens` is not a multiple of `seq`.
    """
    if tokens % seq:
        raise ValueError(f"{tokens} tokens are not a multiple of the sequence length {seq}")
    windows = torch.randint(vocabulary, (tokens // seq, seq + 1), generator=generator)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(frozen=True)
class Workload:
    """A kind of model for `compare.py`.

    `make(**sizes)` builds it; `sample(tokens, generator)` is a random local batch with sequences of `seq`
    tokens. `cut`: numbers that the number of ranks must divide for tensor parallelism.
    """

    make: Callable[..., nn.Module]
    sizes: dict[str, int]
    shape: str
    sample: Callable[[int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    seq: int = 1
    cut: tuple[str, ...] = ()

    def build(self, lora: int | None = None) -> nn.Module:
        """Returns the model. `lora`: the rank of adapters around its frozen weights; None: it has none."""
        model = self.make(**self.sizes)
        return model if lora is None else with_adapters(model, lora)


def _mlp(blocks: int, width: int, inner: int) -> Workload:
    return Workload(
        MLPStack,
        {"blocks": blocks, "width": width, "inner": inner},
        f"{blocks} x (LayerNorm, Linear {width}->{inner}, GELU, Linear {inner}->{width})",
        partial(random_vectors, width=width),
        cut=("inner",),
    )


def _language(
    make: Callable[..., nn.Module], shape: str, *, seq: int, cut: tuple[str, ...] = (), **sizes: int
) -> Workload:
    sizes = {"vocabulary": BYTES, **sizes}
    sample = partial(random_tokens, seq=seq, vocabulary=sizes["vocabulary"])
    return Workload(make, {"seq": seq, **sizes} if make is GPT else sizes, shape, sample, seq, cut)


_HEADS = ("kv_heads", "inner", "vocabulary")

_TINY = {"layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 8, "inner": 2816, "vocabulary": 4096}
_OF_TINY = "Llama, 2 layers, hidden 1024, 16 heads, 8 kv heads, inner 2816, vocabulary 4096, seq 128"

WORKLOADS = {
    "mlp": _mlp(4, 1024, 4096),
    "mlp-tiny": _mlp(2, 64, 192),
    "gpt": _language(GPT, "byte GPT, 6 layers, hidden 384, seq 128", seq=128, layers=6, hidden=384, heads=6),
    "gpt2-small": _language(
        GPT,
        "GPT-2 small: 12 layers, hidden 768, 12 heads, vocabulary 50257, seq 1024",
        seq=1024,
        layers=12,
        hidden=768,
        heads=12,
        vocabulary=50257,
    ),
    "llama-tiny": _language(Llama, _OF_TINY, seq=128, cut=_HEADS, **_TINY),
    "llama-again": _language(Llama, _OF_TINY + ", computed again", seq=128, cut=_HEADS, **_TINY, recompute=1),
    "llama-bytes": _language(
        Llama,
        "Llama, 2 layers, hidden 1024, 16 heads, 8 kv heads, inner 2816, vocabulary 256, seq 64",
        seq=64,
        cut=_HEADS,
        layers=2,
        hidden=1024,
        heads=16,
        kv_heads=8,
        inner=2816,
    ),
    "llama-small": _language(
        Llama,
        "Llama, 2 layers, hidden 512, 8 heads, 4 kv heads, inner 1408, vocabulary 4096, seq 128",
        seq=128,
        cut=_HEADS,
        layers=2,
        hidden=512,
        heads=8,
        kv_heads=4,
        inner=1408,
        vocabulary=4096,
    ),
    # the vocabulary of Llama-3 would hide the block
    "llama-8b-block": _language(
        Llama,
        "one block of Llama-3-8B: hidden 4096, 32 heads, 8 kv heads, inner 14336; vocabulary 4096, seq 1024",
        seq=1024,
        cut=_HEADS,
        layers=1,
        hidden=4096,
        heads=32,
        kv_heads=8,
        inner=14336,
        vocabulary=4096,
    ),
}
