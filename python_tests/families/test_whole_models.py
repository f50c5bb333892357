"""Whole models, bundled: uses besides a plain training loop give the results of one process."""

import contextlib
import copy

import pytest
import torch
from grids import few
from harness import run_ranks
from hf_models import (
    C10D,
    IN_PLACE,
    SHM,
    batch_loss,
    blocks_of,
    check_gradients,
    check_logits,
    check_parameters,
    check_trained,
    exact,
    logits_of,
    mean_loss,
    pair,
    refused,
    rotated,
    run_cases,
)
from models import train
from reference import full
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint


def controls(rank, ranks, kind, variant):
    """Errors that the comparisons below detect: a wrong learning rate, a missing batch, no averaging, one changed
    weight."""
    model, plain = pair(kind, variant)
    shard = next(model.parameters()).detach().to_local()
    for moved in (1e-6, -1e-6):
        shard.view(-1)[:1] += moved * (rank == ranks - 1)
        if moved > 0:
            with refused("one number of the last rank's shard"):  # by every rank
                check_parameters(model, plain)
    check_parameters(model, plain)
    batch_loss(model, kind, rank, 0).backward()
    alone = copy.deepcopy(plain)
    batch_loss(alone, kind, rank, 0).backward()
    with refused("gradients of this rank's batch alone"):
        check_gradients(model, alone)
    mean_loss(plain, kind, ranks, 0).backward()
    check_gradients(model, plain)
    mean_loss(plain, kind, ranks, 1).backward()
    with refused("one batch less"):
        check_gradients(model, plain)
    model.zero_grad(), plain.zero_grad()
    train(model, lambda step: batch_loss(model, kind, rank, step), 1, lr=0.01)
    train(plain, lambda step: mean_loss(plain, kind, ranks, step), 1, lr=0.010001)
    with refused("a learning rate that is wrong by 0.01 %"):
        check_parameters(model, plain)
    with refused("and logits that differ by as much"):
        check_logits(model, plain, kind, rank)


def several_forwards(rank, ranks, kind, variant):
    """Evaluated; two forwards before one backward; two graphs, backward in reverse order; three micro-batches."""
    model, plain = pair(kind, variant)
    with torch.inference_mode():
        check_logits(model.eval(), plain.eval(), kind, rank, 95)
    model.train(), plain.train()
    (batch_loss(model, kind, rank, 0) + 2.0 * batch_loss(model, kind, rank, 1)).backward()
    (mean_loss(plain, kind, ranks, 0) + 2.0 * mean_loss(plain, kind, ranks, 1)).backward()
    check_gradients(model, plain)
    losses = [batch_loss(model, kind, rank, step) for step in (2, 3)]
    check_logits(model, plain, kind, rank)
    for loss in reversed(losses):
        loss.backward()
    (mean_loss(plain, kind, ranks, 2) + mean_loss(plain, kind, ranks, 3)).backward()
    check_gradients(model, plain)
    for batch in (4, 5, 6):
        batch_loss(model, kind, rank, batch).backward()
        mean_loss(plain, kind, ranks, batch).backward()
    check_gradients(model, plain)
    check_trained(model, plain, kind, rank, ranks)


def checkpointed_by_transformers(rank, ranks, kind, variant):
    every = [(reentrant, bundle) for reentrant in (False, True) for bundle in (True, "recompute")]
    for reentrant, bundle in few(every[1:3] if kind == "gpt2" else every[::3], every):
        plain = exact(kind)
        model = rotated(copy.deepcopy(plain), variant, bundle=bundle)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        calls = []
        part = blocks_of(model, kind)[0].get_submodule("attention" if kind == "bert" else "mlp")
        part.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        check_trained(model, plain, kind, rank, ranks)
        assert len(calls) == 4, f"two steps run a checkpointed block four times, got {len(calls)}"


class Checkpointed(nn.Module):
    """A block that is recomputed in backward; `reentrant=None`: is not."""

    def __init__(self, inner: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *arguments, **keywords):
        if self.reentrant is None:
            return self.inner(*arguments, **keywords)
        return checkpoint(lambda *given: self.inner(*given, **keywords), *arguments, use_reentrant=self.reentrant)


def checkpointed_by_torch(rank, ranks, kind, variant):
    """Around an MLP before the conversion, around whole blocks after it, and around both."""
    for reentrant in (False, True):
        plain = exact(kind)
        if kind != "encoder":
            for block in blocks_of(plain, kind):
                block.mlp = Checkpointed(block.mlp)
        model = copy.deepcopy(plain)
        if kind != "encoder":
            for block in blocks_of(model, kind):
                block.mlp.reentrant = reentrant
        rotated(model, variant)
        check_trained(model, plain, kind, rank, ranks)
        for each, kept in ((model, reentrant), (plain, None)):
            blocks = blocks_of(each, kind)
            if kind == "encoder":  # it reads attributes of its first layer
                blocks[0].linear2 = Checkpointed(blocks[0].linear2, kept)
                each.encoder.layers[1] = Checkpointed(each.encoder.layers[1], kept)
                continue
            for number, block in enumerate(blocks):
                blocks[number] = Checkpointed(block, kept)
        check_trained(model, plain, kind, rank, ranks, first=60)


def frozen(rank, ranks, kind, variant):
    """Frozen before and after the conversion, thawed again: whole modules, and parts of what travels together."""
    parts = {
        "llama": ("mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj"),
        "gpt2": ("mlp.c_fc", "mlp.c_proj", "attn.c_proj", "ln_1"),
        "encoder": ("linear1", "linear2", "self_attn.out_proj", "norm1"),
    }[kind]
    plain = exact(kind)

    def freeze(model, number, names):
        for name in names:
            blocks_of(model, kind)[number].get_submodule(name).requires_grad_(False)

    freeze(plain, 0, parts[:1])
    freeze(plain, 1, parts[2:])
    plain.get_parameter(next(name for name, _ in plain.named_parameters())).requires_grad_(False)  # the embedding
    model = rotated(copy.deepcopy(plain), variant)
    check_trained(model, plain, kind, rank, ranks)
    for each in (model, plain):
        each.zero_grad()
        freeze(each, 0, parts)
        blocks_of(each, kind)[1].requires_grad_(False)
    check_trained(model, plain, kind, rank, ranks, first=70)
    for each in (model, plain):
        each.requires_grad_(True)
    check_trained(model, plain, kind, rank, ranks, first=80)


def dropout(rank, ranks, kind, variant):
    """The same elements are dropped under the same seed, in a bundle, beside it, and where a block is recomputed.

    Not so with batch_first: which elements of a tensor dropout picks depends on its strides, and torch's attention
    returns a transposed view there, ours a contiguous tensor."""
    changes = {
        "gpt2": {"resid_pdrop": 0.25, "embd_pdrop": 0.25, "attn_pdrop": 0.25},
        "bert": {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.25},
        "encoder": {"dropout": 0.25, "batch_first": False},
    }
    model, plain = pair(kind, variant, **changes[kind])

    def seeded(each, other, step):
        torch.manual_seed(100 * step + other)
        return batch_loss(each, kind, other, step)

    def check(steps):
        train(model, lambda step: seeded(model, rank, step), steps)
        train(plain, lambda step: sum(seeded(plain, other, step) for other in range(ranks)) / ranks, steps)
        check_parameters(model, plain)

    check(2)
    if kind != "encoder":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        check(2)
    check_logits(model.eval(), plain.eval(), kind, rank)
    with refused("another seed"):
        torch.manual_seed(1)
        check_logits(model.train(), plain.train(), kind, rank)


def leftovers(rank, ranks, kind, variant):
    """Gradients of norms and stray parameters are averaged, and so are ties' and those of row-cut layers' biases.

    Plain SGD: a gradient that is R times too large takes a step that is."""
    changes = {"mlp_bias": True, "attention_bias": True} if kind in ("llama", "tied") else {}
    model, plain = pair(kind, variant, **changes)
    for block in blocks_of(model, kind):
        down = {"gpt2": "mlp.c_proj", "encoder": "linear2"}.get(kind, "mlp.down_proj")
        layer = block.get_submodule(down)
        assert layer.bias is not None and layer.weight.placements[0].dim == (0 if kind == "gpt2" else 1)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    train(model, lambda step: batch_loss(model, kind, rank, step), 2, **options)
    options = {"optimizer": torch.optim.SGD(plain.parameters(), lr=0.1)}
    train(plain, lambda step: mean_loss(plain, kind, ranks, step), 2, **options)
    check_parameters(model, plain)
    check_gradients(model, plain)
    if kind in ("tied", "gpt2"):
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def change_of_dtype(rank, ranks, kind, variant):
    """`.to(dtype)` before the first step and after an evaluation."""
    model = rotated(exact(kind, torch.float32), variant)
    with torch.no_grad():
        logits_of(model, kind, rank, 0)
    plain = exact(kind, torch.float32).double()
    check_trained(model.to(torch.float64), plain, kind, rank, ranks)


def _errors(values: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Root mean square of the differences, relative to that of the truth."""
    flat, exactly = (torch.cat([x.detach().double().reshape(-1) for x in xs]) for xs in (values, truth))
    return ((flat - exactly).norm() / exactly.norm()).item()


def low_precision(rank, ranks, kind, variant):
    """In bfloat16 both models round differently: the error of the ring against float64 may be twice the plain one."""
    plain = exact(kind, torch.float32)
    truth = copy.deepcopy(plain).double()
    mean_loss(truth, kind, ranks, 0).backward()
    expected = [logits_of(truth, kind, rank, 0)], [p.grad for p in truth.parameters()]

    def run(model, loss, casting):
        with casting:
            logits = logits_of(model, kind, rank, 0).float()
            loss(model).backward()
        gradients = [full(p.grad).float() for p in model.parameters()]
        model.zero_grad()
        return _errors([logits], expected[0]), _errors(gradients, expected[1])

    def mean(model):
        return mean_loss(model, kind, ranks, 0)

    def own(model):
        return batch_loss(model, kind, rank, 0)

    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    cases = {
        "autocast": (plain, copy.deepcopy(plain), {}, autocast),
        "policy": (
            copy.deepcopy(plain).bfloat16(),
            copy.deepcopy(plain),
            {"mp_policy": policy},
            contextlib.nullcontext,
        ),
    }
    for name, (reference, start, options, casting) in cases.items():
        theirs = run(copy.deepcopy(reference), mean, casting())
        moved = copy.deepcopy(reference)
        with torch.no_grad():
            for p in moved.parameters():
                p.copy_((p * 2.0**4 / p.abs().max()).round() * p.abs().max() / 2.0**4)
        control = run(moved, mean, casting())
        for bundle in (True, "recompute"):
            ours = run(rotated(copy.deepcopy(start), variant, bundle=bundle, **options), own, casting())
            for what, mine, its, coarse in zip(("logits", "gradients"), ours, theirs, control, strict=True):
                assert mine <= 2.0 * its, f"{name}, bundle={bundle}: {what} off by {mine}, the plain model's by {its}"
                assert mine >= 0.2 * its, f"{name}, bundle={bundle}: {what} off by {mine}: not in bfloat16"
                assert coarse > 2.0 * its, f"control: weights of five bits are off by {coarse}"


LLAMA_GPT2 = [("llama", SHM), ("gpt2", IN_PLACE)]
THREE = [*LLAMA_GPT2, ("encoder", SHM)]
SEVERAL = [*LLAMA_GPT2, ("tied", C10D), ("llama", IN_PLACE), ("tied", SHM), ("llama", C10D)]
CASES = {
    "training": [
        (controls, [("llama", SHM), ("tied", SHM), ("gpt2", C10D), ("encoder", IN_PLACE)]),
        (several_forwards, few(SEVERAL[:3], SEVERAL)),
        (leftovers, [("llama", SHM), ("tied", IN_PLACE), ("gpt2", C10D), ("encoder", SHM)]),
        (frozen, THREE),
    ],
    "numbers": [
        (change_of_dtype, THREE),
        (dropout, [("gpt2", SHM), ("bert", IN_PLACE), ("encoder", SHM)]),
        (low_precision, [("llama", SHM), ("gpt2", C10D), ("encoder", IN_PLACE)]),
        (checkpointed_by_transformers, [*LLAMA_GPT2, ("bert", SHM)]),
        (checkpointed_by_torch, THREE),
    ],
}


@pytest.mark.parametrize(("group", "ranks"), [("training", 3), ("numbers", 2)])
def test_like_one_process(group, ranks):
    run_ranks(run_cases, ranks, CASES[group], timeout=300.0)
