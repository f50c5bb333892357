"""A small transformer, plain or tensor parallel, and its training: for tests of tensor parallelism with rotation."""

import torch
from reference import full, random, whole_gradients
from shards import AdamW, clip_shards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import rtp_ext
from rtp_ext import RotationDims

# 2 and 3 divide the number of heads, of one feature each; nothing divides the others but 3 the hidden width
VOCABULARY, WIDTH, HEADS, HIDDEN, TOKENS = 11, 7, 6, 9, 5
EXACT = 1e-9


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS)
        self.k = nn.Linear(WIDTH, HEADS, bias=False)  # which the softmax cancels
        self.o = nn.Linear(HEADS, WIDTH)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Tiny(nn.Module):
    """After the head come layers that no plan names."""

    def __init__(self, tied=False, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=2)
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.mix, self.last = nn.Linear(VOCABULARY, VOCABULARY), nn.LayerNorm(VOCABULARY)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=dtype, seed=number) * 0.4 + (parameter.dim() < 2))

    def forward(self, ids):
        logits = self.head(self.norm(self.block(self.embed(ids))))
        return self.last(logits + self.mix(logits)) * self.temperature


def sequence_parallel(embedding):
    """Activations between layers are cut along the sequence; every norm of the block sums its gradient."""
    to_rows = {"output_layouts": Shard(1), "use_local_output": False}
    return {
        "embed": embedding(input_layouts=Replicate(), **to_rows),
        "block.first": SequenceParallel(),
        "block.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "block.attention.q": ColwiseParallel(),
        "block.attention.k": ColwiseParallel(),
        "block.attention.v": ColwiseParallel(),
        "block.attention.o": RowwiseParallel(**to_rows),
        "block.second": SequenceParallel(),
        "block.mlp.0": ColwiseParallel(input_layouts=Shard(1)),
        "block.mlp.2": RowwiseParallel(**to_rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def replicated_activations(embedding):
    """Activations between layers are whole, and norms plain."""
    return {
        "embed": embedding(input_layouts=Replicate(), output_layouts=Replicate()),
        **{f"block.attention.{name}": ColwiseParallel() for name in "qkv"},
        "block.attention.o": RowwiseParallel(),
        "block.mlp.0": ColwiseParallel(),
        "block.mlp.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def parallel(shape, names, plan, tied=False, model=None):
    """A model that tensor parallelism has cut over "tp", and the mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = parallelize_module(Tiny(tied) if model is None else model, mesh["tp"], plan)
    if tied:
        model.head.weight = model.embed.weight
    return model, mesh


def rotated(shape, names, plan, tied=False, model=None, **options):
    model, mesh = parallel(shape, names, plan, tied, model)
    dims = RotationDims(ring="ring", replicate="replicas" if "replicas" in names else None)
    return rtp_ext.fully_rotate(model, mesh=mesh, dims=dims, timeout=30.0, **options), mesh


def batch_number(mesh):
    """Returns the index of a rank's batch, the same for all ranks of tensor parallelism; and the number of batches."""
    number, batches = 0, 1
    for name, place, size in zip(mesh.mesh_dim_names, mesh.get_coordinate(), mesh.shape, strict=True):
        if name != "tp":
            number, batches = number * size + place, batches * size
    return number, batches


def batch_loss(model, batch, step):
    ids = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1000 * batch + step))
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def adamw(model, stock=False):
    return (torch.optim.AdamW if stock else AdamW)(model.parameters(), lr=0.02, fused=True)


def step_on(model, optimizer, loss, compared, stock=False):
    """One clipped step. Returns the gradients, where they are to be compared, and their norm. `stock`: torch clips."""
    optimizer.zero_grad()
    loss.backward()
    gradients = whole_gradients(model) if compared else {}
    assert all(gradient is not None for gradient in gradients.values()), gradients
    norm = full((nn.utils.clip_grad_norm_ if stock else clip_shards)(model.parameters(), 0.1)).clone()
    optimizer.step()
    return gradients, norm
