"""Whole models, bundled: what people do besides a plain training loop gives what it gives in one process."""

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from harness import run_ranks
from hf_models import (
    batch_loss,
    blocks_of,
    exact,
    fill,
    inputs_of,
    logits_of,
    make_batch,
    mean_loss,
)
from models import train
from reference import adamw, assert_same, full, random
from test_convert import assert_same_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import rtp_ext

TOLERANCE = 1e-9  # float64, through AdamW
SHM, C10D, IN_PLACE = (False, "shm"), (False, "c10d"), (True, "c10d")


def rotated(model: nn.Module, variant: tuple[bool, str], **options) -> nn.Module:
    in_place, transport = variant
    return rtp_ext.fully_rotate(model, in_place=in_place, transport=transport, timeout=30.0, **options)


def pair(kind: str, variant: tuple[bool, str], **changes) -> tuple[nn.Module, nn.Module]:
    """The converted and the plain model."""
    plain = exact(kind, **changes)
    return rotated(copy.deepcopy(plain), variant), plain


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """A control: the comparison inside must fail."""
    try:
        yield
    except AssertionError:
        return
    raise AssertionError(f"control: {what}, and nobody noticed")


def check_trained(model, plain, kind, rank, ranks, steps=2, first=50):
    """Both train on, and end alike: whatever came before has left no trace."""
    train(model, lambda step: batch_loss(model, kind, rank, first + step), steps)
    train(plain, lambda step: mean_loss(plain, kind, ranks, first + step), steps)
    assert_same_model(model, plain, TOLERANCE)


def check_logits(model, plain, kind, rank, step=90):
    with torch.no_grad():
        assert_same(logits_of(model, kind, rank, step), logits_of(plain, kind, rank, step), TOLERANCE, "logits")


def check_gradients(model, plain):
    assert_same_model(model, plain, TOLERANCE, gradients=True)


def controls(rank, ranks, kind, variant):
    """What the comparisons below refuse: a wrong learning rate, a batch too few, no averaging, one weight moved."""
    model, plain = pair(kind, variant)
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
        assert_same_model(model, plain, TOLERANCE)
    with refused("and logits that differ by as much"):
        check_logits(model, plain, kind, rank)


def evaluations(rank, ranks, kind, variant):
    """Evaluations between training steps, in train mode too, under no_grad and under inference_mode."""
    model, plain = pair(kind, variant)
    for step in range(2):
        for mode in (model.eval, model.train):
            mode()
            check_logits(model, plain, kind, rank, 90 + step)
        with torch.inference_mode():
            ours, theirs = logits_of(model, kind, rank, 95), logits_of(plain, kind, rank, 95)
        assert_same(ours, theirs, TOLERANCE, "under inference_mode")
        check_trained(model, plain, kind, rank, ranks, steps=1, first=step)
    check_logits(model.eval(), plain.eval(), kind, rank)


def several_forwards(rank, ranks, kind, variant):
    """Two forwards before one backward; two graphs, backward in reverse order; three micro-batches."""
    model, plain = pair(kind, variant)
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
    for reentrant in (False, True):
        for bundle in (True, "recompute"):
            plain = exact(kind)
            model = rotated(copy.deepcopy(plain), variant, bundle=bundle)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            calls = []
            blocks_of(model, kind)[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
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


ADAPTED = {
    "llama": (["q_proj", "v_proj"], ["gate_proj", "down_proj"], ["q_proj", "up_proj", "lm_head"]),
    "gpt2": (["c_attn"], ["c_fc"], ["c_attn", "c_proj"]),
}


def _adapted(model: nn.Module, targets: list[str], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with LoRA adapters, none of them zero."""
    import peft

    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    number = 0
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * random(*parameter.shape, dtype=dtype, seed=3000 + number))
                number += 1
    return adapted


def adapters(rank, ranks, kind, variant):
    """LoRA, put around layers before the conversion and after it."""
    for targets in ADAPTED[kind]:
        for before in (True, False):
            plain = _adapted(exact(kind), targets)
            if before:
                model = rotated(copy.deepcopy(plain), variant)
            else:
                converted = rotated(exact(kind), variant)
                check_logits(converted, exact(kind), kind, rank)  # a forward before the adapters come
                model = _adapted(converted, targets)
            ours = {name: p for name, p in model.named_parameters() if p.requires_grad}
            assert ours and all("lora_" in name for name in ours)
            assert all(isinstance(p, DTensor) == before for p in ours.values()), "adapters put on later stay whole"
            check_logits(model, plain, kind, rank)
            with model.disable_adapter():
                check_logits(model, exact(kind), kind, rank)
            with refused("adapters that do not count"):
                check_logits(model, exact(kind), kind, rank)
            alone = copy.deepcopy(plain)
            batch_loss(model, kind, rank, 0).backward()
            mean_loss(plain, kind, ranks, 0).backward()
            batch_loss(alone, kind, rank, 0).backward()
            check_gradients(model, plain)
            with refused("adapters whose gradients are not averaged"):
                check_gradients(model, alone)
            check_trained(model, plain, kind, rank, ranks)


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
    assert_same_model(model, plain, TOLERANCE)
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


class _Refuses(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("in backward")


def exceptions(rank, ranks, kind, variant):
    """An exception in the middle of a block, between q and k, and in backward; then clean steps."""
    model, plain = pair(kind, variant)
    inner = {
        "llama": ("mlp", "mlp.down_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn"),
        "gpt2": ("mlp", "mlp.c_proj", "attn.c_proj"),
        "encoder": ("linear2", "self_attn", "norm2"),
    }[kind]

    def fail(*_):
        raise KeyError("in forward")

    for name in inner:
        part = blocks_of(model, kind)[1].get_submodule(name)
        for register in (part.register_forward_pre_hook, part.register_forward_hook):
            hook = register(fail)
            for context in (contextlib.nullcontext(), torch.no_grad()):
                with context, pytest.raises(KeyError, match="in forward"):
                    logits_of(model, kind, rank, 0)
            hook.remove()
            check_logits(model, plain, kind, rank)
    hook = blocks_of(model, kind)[0].register_forward_hook(lambda *arguments: _Refuses.apply(arguments[-1]))
    value = batch_loss(model, kind, rank, 0)
    with pytest.raises((KeyError, RuntimeError), match="in backward"):
        value.backward()
    hook.remove()
    model.zero_grad()
    check_trained(model, plain, kind, rank, ranks)


class Skippable(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.skip = inner, False

    def forward(self, x, *arguments, **keywords):
        return x if self.skip else self.inner(x, *arguments, **keywords)


def skipped_layer(rank, ranks, kind, variant):
    """A layer that no rank uses in odd steps has no gradients then, and the optimizer leaves it alone."""
    plain = exact(kind)
    blocks = blocks_of(plain, kind)
    blocks[1] = Skippable(blocks[1])
    model = rotated(copy.deepcopy(plain), variant)
    optimizers = adamw(model.parameters(), lr=0.01), adamw(plain.parameters(), lr=0.01)
    for step in range(4):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            blocks_of(each, kind)[1].skip = step % 2 == 1
            optimizer.zero_grad()
        batch_loss(model, kind, rank, step).backward()
        mean_loss(plain, kind, ranks, step).backward()
        check_gradients(model, plain)
        gradients = [p.grad for p in blocks_of(model, kind)[1].parameters()]
        assert all((gradient is None) == (step % 2 == 1) for gradient in gradients), "gradients of the layer"
        for optimizer in optimizers:
            optimizer.step()
    assert_same_model(model, plain, TOLERANCE)


def used_twice(rank, ranks, kind, variant):
    """One block, one MLP, or one attention block called twice in a forward."""
    names = ("mlp", {"llama": "self_attn", "gpt2": "attn"}[kind])
    for name in (*names, None):
        plain = exact(kind)
        blocks = blocks_of(plain, kind)
        if name is None:
            blocks[1] = blocks[0]
        else:
            setattr(blocks[1], name, blocks[0].get_submodule(name))
        check_trained(rotated(copy.deepcopy(plain), variant), plain, kind, rank, ranks)


def projections_apart(rank, ranks, kind, variant):
    """q, k and v of a block called by hand: with different inputs, out of order, twice, with outputs changed in place;
    one call fits none of the outputs that wait, and the layers rotate one by one from then on."""
    names = ("q_proj", "k_proj", "v_proj", "k_proj", "q_proj")
    inputs = [[random(2, 5, 24, dtype=torch.float64, seed=10 * other + i) for i in (0, 1)] for other in range(ranks)]

    def run(attention, xs, order):
        x, y = (x.clone().requires_grad_() for x in xs)
        given = {"same": (x, x, x, x, x), "different": (x, y, x, x, y), "changed": (x, x.clone(), x, y, x)}[order]
        outputs = [attention.get_submodule(name)(each) for name, each in zip(names, given, strict=True)]
        outputs[1].mul_(2.0)
        return sum((i + 1.0) * output.square().sum() for i, output in enumerate(outputs)), x

    for order in ("same", "different", "changed"):
        model, plain = pair(kind, variant)
        attentions = [blocks_of(each, kind)[1].self_attn for each in (model, plain)]
        value, x = run(attentions[0], inputs[rank], order)
        value.backward()
        references = [run(attentions[1], xs, order) for xs in inputs]
        (sum(value for value, _ in references) / ranks).backward()
        assert_same(value, references[rank][0], TOLERANCE, order)
        assert_same(x.grad, references[rank][1].grad * ranks, TOLERANCE, f"input gradient, {order}")
        check_gradients(model, plain)
        with torch.no_grad():  # an input that changes between the calls
            x = inputs[rank][0].clone()
            outputs = []
            for name in names[:3]:
                outputs.append([attention.get_submodule(name)(x) for attention in attentions])
                x.add_(1.0)
        for name, (ours, theirs) in zip(names, outputs, strict=False):
            assert_same(ours, theirs, TOLERANCE, f"{name} of an input that changed")
        check_trained(model, plain, kind, rank, ranks)


def deep_copies(rank, ranks, kind, variant):
    model, plain = pair(kind, variant)
    check_trained(model, plain, kind, rank, ranks, steps=1)
    twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
    if kind == "llama":
        attention, original = (blocks_of(each, kind)[0].self_attn for each in (twin, model))
        groups = [attention.get_submodule(name).together for name in ("q_proj", "k_proj", "v_proj")]
        assert groups[0] is groups[1] is groups[2], "the projections of a copy travel together"
        assert groups[0] is not original.q_proj.together and groups[0].layers[0] is attention.q_proj
    check_trained(twin, plain_twin, kind, rank, ranks)
    with refused("a copy that is trained along"):
        assert_same_model(model, plain_twin, TOLERANCE)
    assert_same_model(model, plain, TOLERANCE)
    check_trained(model, plain, kind, rank, ranks, first=60)


def hooks(rank, ranks, kind, variant):
    """Whoever hooks into a bundle sees, and changes, what flows there; afterwards the bundle is one again."""
    model, plain = pair(kind, variant)
    names = {
        "llama": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn", "self_attn.k_proj"),
        "gpt2": ("mlp.c_fc", "mlp.c_proj", "mlp.act", "attn.c_attn"),
        "encoder": ("linear1", "linear2", "dropout", "dropout2"),
    }[kind]
    for name in names:
        seen, handles = [], []
        for each in (model, plain):
            part = blocks_of(each, kind)[0].get_submodule(name)

            def change(module, arguments, output, seen=seen):
                seen.append(output.detach())
                return 2.0 * output

            handles.append(part.register_forward_hook(change))
        try:
            check_logits(model, plain, kind, rank)
            assert len(seen) == 2, f"{name}: expected both hooks to run, {len(seen)} did"
            assert_same(seen[0], seen[1], TOLERANCE, f"what the hook on {name} sees")
            check_trained(model, plain, kind, rank, ranks, steps=1)
        except AssertionError as error:
            raise AssertionError(f"hook on {name}: {error}") from error
        finally:
            for handle in handles:
                handle.remove()
        check_logits(model, plain, kind, rank)
    parts = [blocks_of(each, kind)[0].get_submodule(names[0]) for each in (model, plain)]
    for part in parts:
        part.forward = lambda x, part=part: 2.0 * type(part).forward(part, x)
    check_logits(model, plain, kind, rank)
    for part in parts:
        del part.forward
    check_trained(model, plain, kind, rank, ranks)


def generation(rank, ranks, kind, variant):
    """Greedy tokens are those of the plain model, with a cache and without, ended by a token at different times."""
    model, plain = pair(kind, variant)
    prompt = inputs_of(make_batch("gpt2", rank, 7))
    prompt["attention_mask"].fill_(1)
    model.eval(), plain.eval()
    for cached in (True, False):
        options = {"do_sample": False, "max_new_tokens": 11, "use_cache": cached, "pad_token_id": 0}
        free = plain.generate(**prompt, eos_token_id=None, **options)
        ours = model.generate(**prompt, eos_token_id=None, **options)
        length = prompt["input_ids"].shape[1]
        assert ours.shape[1] == length + 11 and torch.equal(ours, free), f"use_cache={cached}: {ours} {free}"
        end = free[:, length + 1 + 2 * rank].tolist()  # the rows of this rank end early, at a step of its own
        theirs = plain.generate(**prompt, eos_token_id=end, **options)
        ours = model.generate(**prompt, eos_token_id=end, synced_gpus=True, **options)
        assert theirs.shape[1] < free.shape[1], "a generation that ends early"
        assert torch.equal(ours, theirs), f"use_cache={cached}, ended early: {ours} {theirs}"
    other = fill(exact(kind, hidden_act="relu") if kind == "llama" else exact(kind, activation_function="relu"))
    changed = other.eval().generate(**prompt, eos_token_id=None, **options)
    assert not torch.equal(changed, free), "control: another model says something else"
    check_trained(model.train(), plain.train(), kind, rank, ranks)


def _errors(values: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Root mean square of the differences, relative to that of the truth."""
    flat, exactly = (torch.cat([x.detach().double().reshape(-1) for x in xs]) for xs in (values, truth))
    return ((flat - exactly).norm() / exactly.norm()).item()


def low_precision(rank, ranks, kind, variant):
    """In bfloat16 both models round, each its own way: ours may be off from float64 by twice what the plain is."""
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


LLAMA = [("llama", SHM), ("llama", IN_PLACE)]
LLAMA_GPT2 = [*LLAMA, ("gpt2", IN_PLACE)]
THREE = [*LLAMA_GPT2, ("encoder", SHM)]
CASES = {
    "training": [
        (controls, [("llama", SHM), ("tied", SHM), ("gpt2", C10D), ("encoder", IN_PLACE)]),
        (evaluations, THREE),
        (several_forwards, [*LLAMA_GPT2, ("tied", SHM), ("llama", C10D)]),
        (leftovers, [*THREE, ("tied", IN_PLACE)]),
        (frozen, THREE),
        (change_of_dtype, THREE),
    ],
    "checkpointing": [(checkpointed_by_transformers, LLAMA_GPT2), (checkpointed_by_torch, THREE)],
    "structure": [
        (exceptions, THREE),
        (skipped_layer, LLAMA_GPT2),
        (used_twice, LLAMA_GPT2),
        (projections_apart, LLAMA),
        (deep_copies, THREE),
        (hooks, THREE),
    ],
    "adapters": [(adapters, LLAMA_GPT2), (generation, LLAMA_GPT2), (low_precision, THREE)],
}


def _run(rank, ranks, group):
    for behaviour, cases in CASES[group]:
        for kind, variant in cases:
            try:
                behaviour(rank, ranks, kind, variant)
            except Exception as error:
                where = f"{behaviour.__name__} of {kind}, in_place={variant[0]} transport={variant[1]}"
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize(("group", "ranks"), [("training", 3), ("checkpointing", 2), ("structure", 3), ("adapters", 2)])
def test_like_one_process(group, ranks):
    run_ranks(_run, ranks, group, timeout=300.0)
