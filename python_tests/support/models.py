"""Small models for the tests of conversion, and their training in one process and on a ring."""

from __future__ import annotations

from collections.abc import Callable

import torch
from reference import adamw, random
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH = 19, 10  # divisible by none of the ring sizes but 2


class Block(nn.Module):
    """LayerNorm, a stray parameter, two linear layers, a residual.

    `checkpointed`: recompute in backward, reentrantly (True) or not (False).
    """

    def __init__(self, width: int = WIDTH, hidden: int = 23, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.checkpointed)


class LanguageModel(nn.Module):
    """Token embedding, blocks, a final norm and a vocabulary head that may be tied to the embedding."""

    def __init__(
        self,
        blocks: int = 2,
        tied: bool = False,
        width: int = WIDTH,
        checkpointed: bool | None = None,
        inside: bool = True,
    ) -> None:
        """`inside`: blocks checkpoint one of their methods; otherwise the model checkpoints the blocks."""
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.blocks = nn.ModuleList(Block(width, checkpointed=checkpointed if inside else None) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointed = None if inside else checkpointed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.head(self.norm(x)) * self.temperature


def make_model(dtype: torch.dtype = torch.float64, **options) -> LanguageModel:
    """Builds the same model on every rank, with different values in all parameters."""
    model = LanguageModel(**options).to(dtype)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            values = random(*parameter.shape, dtype=dtype, seed=1000 + number)
            offset = 1.0 if name.endswith(("norm.weight", "scale", "temperature")) else 0.0
            parameter.copy_(values * 0.3 + offset)
    return model


def make_batch(rank: int, step: int, tokens: int = 6) -> tuple[Tensor, Tensor]:
    """ids and targets [2, tokens] of one rank and step."""
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    ids = torch.randint(VOCABULARY, (2, tokens + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def batch_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return _loss_of(model, *make_batch(rank, step))


def mean_loss(model: nn.Module, ranks: int, step: int) -> Tensor:
    """The loss that the plain model minimises when `ranks` ranks average their gradients: all batches at once."""
    batches = [make_batch(rank, step) for rank in range(ranks)]
    return _loss_of(model, *(torch.cat(each) for each in zip(*batches, strict=True)))


def _loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    device = next(model.parameters()).device
    return nn.functional.cross_entropy(model(ids.to(device)).flatten(0, 1), targets.to(device).flatten())


def train(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    steps: int,
    *,
    lr: float = 0.01,
    between: Callable[[int], object] = lambda step: None,
    optimizer: torch.optim.Optimizer | None = None,
    clip: float | None = None,
) -> list[float]:
    """Trains with AdamW on the parameters that require gradients. Returns the loss of every step, or the gradient norm
    with clipping."""
    optimizer = optimizer or adamw([p for p in model.parameters() if p.requires_grad], lr=lr)
    values = []
    for step in range(steps):
        between(step)
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            value = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        values.append(value.item())
    return values
