"""Whole models, bundled, whose modules others interfere with: adapters, hooks, copies, sharing, exceptions."""

import contextlib
import copy

import pytest
import torch
from grids import few
from harness import run_ranks
from hf_models import (
    IN_PLACE,
    SHM,
    TOLERANCE,
    batch_loss,
    blocks_of,
    check_gradients,
    check_logits,
    check_parameters,
    check_trained,
    exact,
    inputs_of,
    logits_of,
    make_batch,
    mean_loss,
    pair,
    refused,
    rotated,
    run_cases,
)
from reference import adamw, assert_same, random
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor


class _Refuses(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("in backward")


def raise_in_forward(model, kind, rank, name):
    """Has a module of the second block raise, before and after its own forward, with gradients and without."""

    def fail(*_):
        raise KeyError("in forward")

    part = blocks_of(model, kind)[1].get_submodule(name)
    for register in (part.register_forward_pre_hook, part.register_forward_hook):
        hook = register(fail)
        for context in (contextlib.nullcontext(), torch.no_grad()):
            with context, pytest.raises(KeyError, match="in forward"):
                logits_of(model, kind, rank, 0)
            for name, parameter in model.named_parameters():
                path, _, own = name.rpartition(".")
                assert getattr(model.get_submodule(path), own) is parameter, f"{name}: still inside a forward"
        hook.remove()


def check_together(model, kind):
    """Whether the projections of attention still travel together."""
    groups = [part.together for part in model.modules() if getattr(part, "together", None) is not None]
    assert len(groups) == (6 if kind == "llama" else 0) and all(group.shared for group in groups)


def exceptions(rank, ranks, kind, variant):
    """An exception in the middle of a block, between q and k, and in backward; then clean steps."""
    model, plain = pair(kind, variant)
    inner = {
        "llama": ("mlp", "mlp.down_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn"),
        "gpt2": ("mlp", "mlp.c_proj", "attn.c_proj"),
        "encoder": ("linear2", "self_attn", "norm2"),
    }[kind]

    for name in inner:
        raise_in_forward(model, kind, rank, name)
        check_logits(model, plain, kind, rank)
    hook = blocks_of(model, kind)[0].register_forward_hook(lambda *arguments: _Refuses.apply(arguments[-1]))
    value = batch_loss(model, kind, rank, 0)
    with pytest.raises((KeyError, RuntimeError), match="in backward"):
        value.backward()
    hook.remove()
    model.zero_grad()
    check_trained(model, plain, kind, rank, ranks)
    check_together(model, kind)


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
    check_parameters(model, plain)


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
        check_trained(model, plain, kind, rank, ranks)
    model, plain = pair(kind, variant)
    x = inputs[rank][0]
    with torch.no_grad():  # an input that changes between the calls
        for name in names[:3]:
            ours, theirs = (blocks_of(each, kind)[1].self_attn.get_submodule(name)(x) for each in (model, plain))
            assert_same(ours, theirs, TOLERANCE, f"{name} of an input that changed")
            x.add_(1.0)
    model, plain = pair(kind, variant)
    with torch.no_grad():  # weights that change between the calls
        for name in names[:3]:
            attentions = [blocks_of(each, kind)[1].self_attn for each in (model, plain)]
            ours, theirs = (attention.get_submodule(name)(x) for attention in attentions)
            assert_same(ours, theirs, TOLERANCE, f"{name} of weights that changed")
            for attention in attentions:
                attention.v_proj.weight.mul_(2.0)


def deep_copies(rank, ranks, kind, variant):
    model, plain = pair(kind, variant)
    check_trained(model, plain, kind, rank, ranks, steps=1)
    twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
    if kind == "llama":
        attention, original = (blocks_of(each, kind)[0].self_attn for each in (twin, model))
        assert attention.q_proj.together is attention.v_proj.together is not original.q_proj.together
        raise_in_forward(twin, kind, rank, "self_attn.k_proj")
    check_trained(twin, plain_twin, kind, rank, ranks)
    check_together(twin, kind)
    with refused("a copy that is trained along"):
        check_parameters(model, plain_twin)
    check_parameters(model, plain)
    check_trained(model, plain, kind, rank, ranks, first=60)


def hooks(rank, ranks, kind, variant):
    """Hooks on modules of a bundle see and change their values; without the hooks the bundle is used again."""
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
    every = [(targets, before) for targets in ADAPTED[kind] for before in (True, False)]
    # each of a kind's targets one way, the next the other; of the other kind the other way round
    enough = every[kind == "gpt2" :: 4] + every[2 + (kind == "llama") :: 4]
    for targets, before in few(enough, every):
        plain = _adapted(exact(kind), targets)
        if before:
            model = rotated(copy.deepcopy(plain), variant)
        else:
            converted = rotated(exact(kind), variant)
            check_logits(converted, exact(kind), kind, rank)  # a forward before the adapters come
            model = _adapted(converted, targets)
            model.merge_adapter()  # before its first forward
            model.unmerge_adapter()
        ours = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert ours and all("lora_" in name for name in ours)
        assert all(isinstance(p, DTensor) == before for p in ours.values()), "adapters put on later stay whole"
        check_logits(model, plain, kind, rank)
        with model.disable_adapter():
            check_logits(model, exact(kind), kind, rank)
        with refused("adapters that do not count"):
            check_logits(model, exact(kind), kind, rank)
        alone = copy.deepcopy(plain)
        for batch in (0, 1):
            batch_loss(model, kind, rank, batch).backward()
            mean_loss(plain, kind, ranks, batch).backward()
            batch_loss(alone, kind, rank, batch).backward()
        check_gradients(model, plain)
        with refused("adapters whose gradients are not averaged"):
            check_gradients(model, alone)
        check_trained(model, plain, kind, rank, ranks)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        check_trained(model, plain, kind, rank, ranks, first=60)
        merged(model, plain, kind, rank, ranks)


def merged(model, plain, kind, rank, ranks):
    """Adapters are loaded from one rank, merged into their layers, taken out again, and merged for good."""
    values = {name: 1.25 * value for name, value in plain.state_dict().items()}
    plain.load_state_dict(values)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(values) if rank == 0 else {}, options=options)
    check_parameters(model, plain)
    model.merge_adapter()
    check_logits(model, plain, kind, rank)
    with refused("adapters that are merged"):
        check_parameters(model, plain)
    model.unmerge_adapter()
    check_parameters(model, plain)
    model, plain = model.merge_and_unload().requires_grad_(True), plain.merge_and_unload().requires_grad_(True)
    assert not any("lora_" in name for name, _ in model.named_parameters())
    check_trained(model, plain, kind, rank, ranks, steps=1)


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
    other = exact(kind, **{"llama": {"hidden_act": "relu"}, "gpt2": {"activation_function": "relu"}}[kind])
    changed = other.eval().generate(**prompt, eos_token_id=None, **options)
    assert not torch.equal(changed, free), "control: another model says something else"
    check_trained(model.train(), plain.train(), kind, rank, ranks)


LLAMA_GPT2 = [("llama", SHM), ("gpt2", IN_PLACE)]
THREE = [*LLAMA_GPT2, ("encoder", SHM)]
CASES = {
    "structure": [
        (exceptions, THREE),
        (skipped_layer, LLAMA_GPT2),
        (used_twice, LLAMA_GPT2),
        (projections_apart, [("llama", SHM), ("llama", IN_PLACE)]),
        (deep_copies, THREE),
        (hooks, THREE),
    ],
    "adapters": [(adapters, [("llama", IN_PLACE), ("gpt2", SHM)]), (generation, [("llama", SHM), ("gpt2", IN_PLACE)])],
}


@pytest.mark.parametrize(("group", "ranks"), [("structure", 3), ("adapters", 2)])
def test_like_one_process(group, ranks):
    run_ranks(run_cases, ranks, CASES[group], timeout=300.0)
