"""Rotated multi-head attention gives what nn.MultiheadAttention gives in one process: see attention_cases.py."""

import copy
import functools
import pickle
from itertools import product

import pytest
import torch
from attention_cases import (
    FORMS,
    MODULES,
    Form,
    call,
    check,
    fits,
    loss,
    make_masks,
    make_module,
    make_tensors,
    observe,
    reference,
    run,
    tolerances,
)
from harness import on_ranks, run_ranks
from reference import STEPS, TOLERANCE, adamw, assert_same, chunk, differs, double_copy, full, local, random
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rtp_ext
from rtp_ext.nn import RotatedLinear, RotatedMultiheadAttention

TIMEOUT = 30.0
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "transport", "route", "in_place", "every"),
    [
        (1, "shm", "ring", False, 3),
        (2, "shm", "ring", False, 3),
        (3, "shm", "direct", False, 3),
        (3, "c10d", "ring", True, 5),
    ],
)
def test_one_pass(ranks, ring, cases, transport, route, in_place, every):
    """`every`: of the cases, every second or third, another third on each number of ranks."""
    forms = [(name, form) for name, form in product(MODULES, FORMS) if fits(make_module(name, DTYPES[0]), FORMS[form])]
    modules = {
        (name, dtype): RotatedMultiheadAttention.from_module(make_module(name, dtype), ring)
        for name, dtype in product(MODULES, DTYPES)
    }
    for dtype, (name, form) in list(product(DTYPES, forms))[ranks % every :: every]:
        with cases.case(f"{name} {dtype} in_place={in_place} {form}"):
            check(modules[name, dtype], name, form, dtype)


def _controls(rank, ranks):
    """Each tolerance fails if a rank's part is missing, if gradients are summed, and without the mask."""
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for dtype, (name, form) in product(
            DTYPES, (("packed", "self causal hint, weights"), ("separate bias_kv", "all 2d"))
        ):
            module = RotatedMultiheadAttention.from_module(make_module(name, dtype), ring)
            actual = observe(module, form, dtype)
            allowed = tolerances(name, form, dtype, ranks, rank)
            values, gradients = reference(name, form, dtype, ranks)
            _, lacking = reference(name, form, dtype, ranks, skipped=(rank + 1) % ranks)
            for key, right in gradients.items():
                if key == "in_proj_bias" and "kv" not in name:
                    continue  # that of the keys is zero but for roundings
                assert not differs(actual[key], right, allowed[key])
                assert differs(actual[key], right * ranks, allowed[key]), f"{name} {dtype} summed {key}"
                assert differs(actual[key], lacking[key], allowed[key]), f"{name} {dtype} lacking {key}"
            plain = double_copy(make_module(name, dtype))
            wrong = [run(plain, Form(FORMS[form].inputs, average=FORMS[form].average), rank, dtype, torch.float64)]
            with torch.no_grad():
                weight = plain.in_proj_weight if plain._qkv_same_embed_dim else plain.v_proj_weight
                chunk(weight, ranks, (rank + 1) % ranks).zero_()
            wrong.append(run(plain, FORMS[form], rank, dtype, torch.float64))
            for other in wrong:
                for key in ("output", "gradient of input 0"):
                    assert not differs(actual[key], values[rank][key], allowed[key])
                    assert differs(actual[key], other[key], allowed[key]), f"{name} {dtype} {key}"


def test_tolerances_fail_on_wrong_results():
    run_ranks(_controls, 2)
    run_ranks(_controls, 4)


def training_loss(module: nn.MultiheadAttention, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    form = FORMS["all 3d bool"]
    tensors = [x.to(dtype) for x in make_tensors(module, form, rank, torch.float32, 1000 * step)]
    results = call(module, form, tensors, make_masks(module, form, rank, torch.float32))
    return loss(results, rank, 1000 * step) + 0.5 * results[0].square().sum()


# With rows appended to the keys: else the gradient of their bias is nothing but roundings, which AdamW would scale up.
TRAINED = ["packed bias_kv zero", "separate bias_kv"]


@functools.cache
def train_reference(name: str, ranks: int, skipped: int = -1) -> tuple[nn.Module, list[float]]:
    """The trained module, and what evaluation gave before each step on rank 0's batch."""
    module, evaluations = double_copy(make_module(name, torch.float32)), []
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        with torch.no_grad():
            evaluations.append(training_loss(module, 0, step, torch.float64).item())
        optimizer.zero_grad()
        for rank in range(ranks):
            (training_loss(module, rank, step, torch.float64) / ranks * (rank != skipped)).backward()
        optimizer.step()
    return module, evaluations


@on_ranks()
@pytest.mark.parametrize(("ranks", "transport", "in_place"), [(2, "shm", False), (3, "c10d", True), (4, "shm", True)])
def test_parameters_after_adamw_steps(rank, ranks, ring, cases, transport, in_place):
    for name, dtype in product(TRAINED, (torch.float64, torch.float32)):
        plain = make_module(name, torch.float32).to(dtype)
        module = RotatedMultiheadAttention.from_module(plain, ring)
        optimizer = adamw(module.parameters())
        expected, evaluations = train_reference(name, ranks)
        lacking, _ = train_reference(name, ranks, skipped=ranks - 1)
        with cases.case(f"{name} {dtype}"):
            for step in range(STEPS):
                for mode in (torch.no_grad, torch.inference_mode):
                    module.eval()
                    with mode():
                        value = training_loss(module, 0, step, dtype)
                    assert_same(
                        value,
                        torch.tensor(evaluations[step], dtype=torch.float64),
                        100 * TOLERANCE[dtype],
                        f"step {step}",
                    )
                module.train()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                training_loss(module, rank, step, dtype).backward()
                optimizer.step()
            for key, right in expected.named_parameters():
                actual = full(module.get_parameter(key))
                tolerance = 1e-9 if dtype == torch.float64 else 1e-4  # AdamW divides by small gradients
                assert_same(actual, right, tolerance, key)
                if ranks > 1:
                    assert differs(actual, lacking.get_parameter(key), tolerance), f"the control passes: {key}"


@on_ranks()
@pytest.mark.parametrize(("ranks", "transport", "in_place"), [(2, "shm", False), (3, "c10d", True)])
def test_repeated_forwards_and_frozen_parts(rank, ranks, ring, cases, transport, in_place):
    """Two forwards before one backward, with an evaluation and a pass of a copy between them; frozen parts."""
    dtype, form = torch.float64, "all 2d"
    for name in ("packed", "separate bias_kv"):
        plain = make_module(name, dtype)
        module = RotatedMultiheadAttention.from_module(plain, ring)
        names = [key for key, _ in module.named_parameters()]
        for frozen in [[], names, *([key] for key in names), ["in_proj_bias", "out_proj.weight", "bias_k"]]:
            for key in names:
                module.get_parameter(key).requires_grad_(key not in frozen)
            module.zero_grad()
            twin = copy.deepcopy(module)
            totals, tensors = [], []
            for batch in range(2):
                tensors.append([x.requires_grad_() for x in make_tensors(module, FORMS[form], rank + batch, dtype)])
                masks = make_masks(module, FORMS[form], rank + batch, dtype)
                totals.append(loss(call(module, FORMS[form], tensors[-1], masks), rank + batch))
                with torch.no_grad():
                    call(module.eval(), FORMS[form], tensors[-1], masks)
                loss(call(twin, FORMS[form], tensors[-1], masks), rank + batch)
                module.train()
            sum(totals).backward()
            values, every = reference(name, form, dtype, ranks + 1)
            _, first = reference(name, form, dtype, ranks)
            _, lowest = reference(name, form, dtype, 1)
            with cases.case(f"{name} frozen {frozen}"):
                for batch in range(2):
                    for at, x in enumerate(tensors[batch]):
                        right = values[rank + batch][f"gradient of input {at}"]
                        assert_same(x.grad, right, 1e-10, f"gradient of input {at}")
                for key in names:
                    # batches 0 .. R-1, and 1 .. R
                    right = first[key] + (every[key] * (ranks + 1) - lowest[key]) / ranks
                    gradient = module.get_parameter(key).grad
                    assert (gradient is None) == (key in frozen), key
                    if gradient is not None:
                        assert_same(full(gradient), right, 1e-10, key)
    module.requires_grad_(False)
    assert not call(module, FORMS[form], make_tensors(module, FORMS[form], 0, dtype), {})[0].requires_grad


@on_ranks(3)
def test_bfloat16_of_float32_parameters(rank, ranks, ring, cases):
    """Float32 parameters that compute in bfloat16, by autocast or by policy: gradients are float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name, form, autocast in product(MODULES, ("all 2d", "all 3d bool", "all padding"), (True, False)):
        module = make_module(name, torch.bfloat16).float()
        module.__class__ = RotatedMultiheadAttention
        module._rotate(ring, mp_policy=None if autocast else policy)
        values, gradients = reference(name, form, torch.bfloat16, ranks)
        allowed = tolerances(name, form, torch.bfloat16, ranks, rank)
        before = ring.bytes_sent("weight")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            mine = run(module, FORMS[form], rank, torch.bfloat16, torch.float32 if autocast else torch.bfloat16)
        with cases.case(f"{name} {form} autocast={autocast}"):
            assert mine["output"].dtype == torch.bfloat16
            whole = sum(p.numel() for p in module.parameters())
            assert ring.bytes_sent("weight") - before <= 2 * 2 * whole, "float32 travelled"
            for key, right in values[rank].items():
                assert_same(mine[key], right, allowed[key], key)
            for key, right in gradients.items():
                gradient = module.get_parameter(key).grad
                assert gradient.dtype == torch.float32
                assert_same(full(gradient), right, allowed[key], key)


@on_ranks(2)
def test_dropout(rank, ring):
    """The same random numbers as in the plain module."""
    for name, form in product(("packed", "packed batch_first", "separate bias_kv"), FORMS):
        plain = make_module(name, torch.float64)
        plain.dropout = 0.4
        if not fits(plain, FORMS[form]):
            continue
        module = RotatedMultiheadAttention.from_module(plain, ring)
        torch.manual_seed(rank)
        expected = run(plain, FORMS[form], rank, torch.float64, torch.float64)
        torch.manual_seed(rank)
        actual = run(module, FORMS[form], rank, torch.float64, torch.float64)
        for key, right in expected.items():
            assert_same(actual[key], right, 1e-10, f"{name} {form} {key}")
        torch.manual_seed(rank + 1)
        other = run(module, FORMS[form], rank, torch.float64, torch.float64)
        assert differs(other["output"], expected["output"], 1e-10), "control: other random numbers"


class _Largest(TorchDispatchMode):
    """The most elements of any result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_no_weights_are_made_where_none_are_wanted():
    batch, heads, length = 2, 4, 64
    module = RotatedMultiheadAttention(8, heads, ring=rtp_ext.Ring.emulated(2), batch_first=True)
    x = random(batch, length, 8, dtype=torch.float32, seed=0).requires_grad_()
    causal = nn.Transformer.generate_square_subsequent_mask(length)
    padding = torch.zeros(batch, length)
    for masks in (
        {},
        {"attn_mask": causal},
        {"attn_mask": causal, "is_causal": True},
        {"attn_mask": causal, "key_padding_mask": padding},
    ):
        for need_weights in (False, True):
            with _Largest() as largest:
                y, weights = module(x, x, x, need_weights=need_weights, **masks)
                y.sum().backward()
            assert (weights is None) == (not need_weights)
            assert (largest.elements >= batch * heads * length * length) == need_weights, masks.keys()


@on_ranks(3)
def test_constructor_and_reset_are_those_of_the_plain_module(ranks, ring):
    for embed_dim, heads, options in MODULES.values():
        torch.manual_seed(3)
        plain = nn.MultiheadAttention(embed_dim, heads, **options)
        torch.manual_seed(3)
        module = RotatedMultiheadAttention(embed_dim, heads, **options, ring=ring)
        state = {key: full(value) for key, value in module.state_dict().items()}
        assert list(state) == list(plain.state_dict())
        for key, right in plain.state_dict().items():
            assert_same(state[key], right, 0.0, key)
            mine = local(module.get_parameter(key))
            assert mine.numel() <= -(-max(right.shape) // ranks) * right.numel() // max(right.shape), "a shard"
        assert isinstance(module, nn.MultiheadAttention) and isinstance(module.out_proj, RotatedLinear)
        assert isinstance(module.out_proj, NonDynamicallyQuantizableLinear)
        assert module.out_proj.qualified_name == "RotatedMultiheadAttention.out_proj"

        for target, reset in (
            (plain, _reset),
            (module, _reset),
            (module, lambda m: rtp_ext.init_weights(m, _reset)),
        ):
            with torch.no_grad():
                for parameter in target.parameters():
                    local(parameter).fill_(7.0)
            torch.manual_seed(4)
            reset(target)
            for key, right in plain.state_dict().items():
                assert_same(full(target.get_parameter(key)), right, 0.0, f"reset {key}")
        assert not hasattr(plain, "reset_parameters") and not hasattr(module, "reset_parameters")

        meta = RotatedMultiheadAttention(embed_dim, heads, **options, ring=ring, device="meta")
        assert all(parameter.is_meta for parameter in meta.parameters())
        with torch.no_grad():
            for parameter in meta.to_empty(device="cpu").parameters():
                local(parameter).fill_(7.0)
        torch.manual_seed(4)
        meta._reset_parameters()
        assert_same(full(meta.out_proj.weight), plain.out_proj.weight, 0.0, "out_proj.weight after meta")

        twin = RotatedMultiheadAttention.from_module(plain, ring)
        assert type(plain) is nn.MultiheadAttention and type(plain.out_proj) is NonDynamicallyQuantizableLinear
        assert type(plain.out_proj.weight) is nn.Parameter
        assert_same(full(twin.out_proj.weight), plain.out_proj.weight, 0.0, "out_proj.weight")
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(module)
    with pytest.raises(TypeError, match="expected a MultiheadAttention, got a Linear"):
        RotatedMultiheadAttention.from_module(nn.Linear(2, 2), ring)

    module = RotatedMultiheadAttention(8, 2, ring=ring)
    x = torch.zeros(3, 1, 8)
    before = ring.hops("weight")
    y, _ = module(x, x, x)
    assert ring.hops("weight") - before == 2 * (ranks - 1), "one rotation for q, k and v, one for out_proj"
    y.sum().backward()


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.MultiheadAttention):
        module._reset_parameters()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_emulated_ring_is_a_module_of_repeated_shards(ranks):
    for options in ({}, {"add_bias_kv": True}, {"kdim": 5, "vdim": 6, "add_bias_kv": True}):
        plain = nn.MultiheadAttention(8, 4, **options, dtype=torch.float64)
        module = RotatedMultiheadAttention.from_module(plain, rtp_ext.Ring.emulated(ranks))
        with torch.no_grad():
            for key, parameter in plain.named_parameters():
                shard = module.get_parameter(key)
                if shard.shape != parameter.shape:
                    parameter.copy_(shard.repeat(ranks, *[1] * (shard.dim() - 1)))
                elif key == "in_proj_bias":  # rank 0's shards of the three biases
                    parameter.copy_(torch.cat([part[: 8 // ranks].repeat(ranks) for part in parameter.chunk(3)]))
        inputs = [random(3, 2, size, dtype=torch.float64, seed=size) for size in (8, plain.kdim, plain.vdim)]
        for mine, right in zip(module(*inputs), plain(*inputs), strict=True):
            assert_same(mine, right, 1e-12, f"{options}")
        loss(module(*inputs), 0).backward()
        assert all(parameter.grad is not None for parameter in module.parameters())


def test_errors_name_what_is_wrong():
    ring = rtp_ext.Ring.emulated(2)
    module = RotatedMultiheadAttention(8, 2, kdim=5, ring=ring)
    x, key, value = torch.zeros(3, 2, 8), torch.zeros(4, 2, 5), torch.zeros(4, 2, 8)
    first = r"RotatedMultiheadAttention: expected query, key, value of shapes \[L, N, 8\], \[S, N, 5\]"
    for arguments in ((x, key, x), (x, value, value), (x[:, :1], key, value), (x[0], key, value), (x[None],) * 3):
        with pytest.raises(ValueError, match=first):
            module(*arguments)
    for options, message in (
        ({"attn_mask": torch.zeros(3, 3)}, r"attn_mask of shape \(3, 4\) or \(4, 3, 4\), got \(3, 3\)"),
        ({"key_padding_mask": torch.zeros(4, 2)}, r"key_padding_mask of shape \(2, 4\), got \(4, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            module(x, key, value, **options)
    with pytest.raises(RuntimeError, match="expected an attn_mask with is_causal"):
        module(x, key, value, is_causal=True)
    with pytest.raises(AssertionError, match="only bool and floating types of attn_mask"):  # torch's own
        module(x, key, value, attn_mask=torch.zeros(3, 4, dtype=torch.int64))
    nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(2, 8)], layout=torch.jagged)
    with pytest.raises(TypeError, match="got a nested one"):
        module(nested, nested, nested)
    with pytest.raises(ValueError, match=r"its out_proj is a Sequential"):
        other = nn.MultiheadAttention(8, 2)
        other.out_proj = nn.Sequential(nn.Linear(8, 8))
        RotatedMultiheadAttention.from_module(other, ring)
    with pytest.raises(ValueError, match=r"has not: extra"):
        other = nn.MultiheadAttention(8, 2)
        other.extra = nn.Parameter(torch.zeros(2))
        RotatedMultiheadAttention.from_module(other, ring)
