"""Rotated multi-head attention gives what nn.MultiheadAttention gives in one process: see reference.py."""

import copy
import functools
import pickle
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from harness import Cases, run_ranks
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
L, S = 4, 5  # lengths of target and source

# embed_dim, num_heads and options. No width is a multiple of all ring sizes, and no shard ends where a head does.
MODULES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "packed": (15, 3, {}),
    "packed batch_first": (14, 7, {"batch_first": True}),
    "packed no bias": (14, 7, {"bias": False}),
    "packed bias_kv zero": (15, 3, {"add_bias_kv": True, "add_zero_attn": True}),
    "packed narrow": (2, 1, {"batch_first": True, "add_bias_kv": True}),  # fewer rows than ranks
    "separate": (14, 7, {"kdim": 9, "vdim": 11, "batch_first": True}),
    "separate alike": (15, 3, {"kdim": 9, "vdim": 9}),
    "separate bias_kv": (14, 7, {"kdim": 9, "vdim": 11, "add_bias_kv": True}),
    "separate no bias": (15, 5, {"kdim": 15, "vdim": 11, "bias": False, "add_zero_attn": True}),
}


@dataclass(frozen=True)
class Form:
    """How a module is called: on which inputs, with which masks, for which results."""

    inputs: str  # "self", "cross" (key is value) or "all" (three different tensors)
    attn_mask: str | None = None
    padding: str | None = None
    batched: bool = True
    need_weights: bool = True
    average: bool = True
    is_causal: bool = False


FORMS = {
    "self": Form("self"),
    "self causal hint": Form("self", "causal", need_weights=False, is_causal=True),
    "self causal hint, padding": Form("self", "causal", "bool", need_weights=False, is_causal=True),
    "self causal hint, weights": Form("self", "causal", average=False, is_causal=True),
    "cross": Form("cross", need_weights=False),
    "cross 2d": Form("cross", "bool 2d", need_weights=False),
    "all 2d": Form("all", "float 2d"),
    "all 3d": Form("all", "float 3d", "float", average=False),
    "all 3d bool": Form("all", "bool 3d", "bool", need_weights=False),
    "all padding": Form("all", padding="float", need_weights=False),
    "unbatched self": Form("self", "bool 2d", "bool", batched=False),
    "unbatched all": Form("all", "float 3d", "float", batched=False, average=False),
    "unbatched cross": Form("cross", padding="bool", batched=False, need_weights=False),
}


def make_module(name: str, dtype: torch.dtype) -> nn.MultiheadAttention:
    embed_dim, heads, options = MODULES[name]
    module = nn.MultiheadAttention(embed_dim, heads, dtype=dtype, **options)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(random(*parameter.shape, dtype=dtype, seed=number, scale=scale))
    return module


def fits(module: nn.MultiheadAttention, form: Form) -> bool:
    if form.inputs == "self":
        return module._qkv_same_embed_dim
    return form.inputs == "all" or module.kdim == module.vdim


def make_tensors(module: nn.MultiheadAttention, form: Form, rank: int, dtype: torch.dtype, seed: int = 100) -> list:
    """The different input tensors of a rank; the ranks have different batches."""
    batch = (2 + rank,) if form.batched else ()
    wanted = {
        "self": [(L, module.embed_dim)],
        "cross": [(L, module.embed_dim), (S, module.kdim)],
        "all": [(L, module.embed_dim), (S, module.kdim), (S, module.vdim)],
    }[form.inputs]
    return [
        random(*((*batch, length) if module.batch_first else (length, *batch)), features, dtype=dtype, seed=seed + at)
        for at, (length, features) in enumerate(wanted, 10 * rank)
    ]


def make_masks(module: nn.MultiheadAttention, form: Form, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    batch, source = 2 + rank if form.batched else 1, L if form.inputs == "self" else S

    def mask(kind: str | None, *shape: int) -> torch.Tensor | None:
        if kind is None:
            return None
        if kind == "causal":
            return torch.ones(shape, dtype=torch.bool).triu(1)
        values = random(*shape, dtype=dtype, seed=200 + rank)
        if kind.startswith("float"):
            return values
        allowed = values < 0.3
        allowed[..., 0] = True  # no row without any key
        return ~allowed

    each = form.attn_mask is not None and "3d" in form.attn_mask
    return {
        "attn_mask": mask(form.attn_mask, *((batch * module.num_heads,) if each else ()), L, source),
        "key_padding_mask": mask(form.padding, *((batch,) if form.batched else ()), source),
        "need_weights": form.need_weights,
        "average_attn_weights": form.average,
        "is_causal": form.is_causal,
    }


def call(module: nn.MultiheadAttention, form: Form, tensors: list, masks: dict[str, Any]) -> tuple:
    query, key, value = (tensors[at] for at in {"self": (0, 0, 0), "cross": (0, 1, 1), "all": (0, 1, 2)}[form.inputs])
    return module(query, key, value, **masks)


def loss(results: tuple, rank: int, seed: int = 300) -> torch.Tensor:
    total = torch.zeros((), dtype=results[0].dtype)
    for at, result in enumerate(results):
        if result is not None:
            weigh = random(*result.shape, dtype=torch.bfloat16, seed=seed + 10 * rank + at)
            total = total + (result * weigh.to(result.dtype)).sum()
    return total


def run(module: nn.MultiheadAttention, form: Form, rank: int, dtype: torch.dtype, compute: torch.dtype) -> dict:
    """Forward and backward of one local batch: results and input gradients, by what they are."""
    tensors = [tensor.to(compute).requires_grad_() for tensor in make_tensors(module, form, rank, dtype)]
    masks = make_masks(module, form, rank, dtype)
    for key in ("attn_mask", "key_padding_mask"):
        if masks[key] is not None and masks[key].is_floating_point():
            masks[key] = masks[key].to(compute)
    results = call(module, form, tensors, masks)
    loss(results, rank).backward()
    values = {"output": results[0].detach(), "weights": None if results[1] is None else results[1].detach()}
    return values | {f"gradient of input {at}": tensor.grad for at, tensor in enumerate(tensors)}


@functools.cache
def reference(
    name: str, form: str, dtype: torch.dtype, ranks: int, compute: torch.dtype = torch.float64, skipped: int = -1
) -> tuple[list[dict], dict]:
    """What the plain module gives on every rank's batch, and the averaged gradients of its parameters.

    `skipped`: a rank whose gradients are left out, for controls.
    """
    module, values, gradients = make_module(name, dtype).to(compute), [], {}
    for rank in range(ranks):
        module.zero_grad()
        values.append(run(module, FORMS[form], rank, dtype, compute))
        for key, parameter in module.named_parameters():
            part = parameter.grad.double() / ranks * (rank != skipped)
            gradients[key] = gradients[key] + part if key in gradients else part
    return values, gradients


def error(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Relative to the largest magnitude of what is expected."""
    if expected is None or not expected.any():
        return 0.0
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def tolerances(name: str, form: str, dtype: torch.dtype, ranks: int, rank: int) -> dict[str, float]:
    """By what is compared. In bfloat16 a result went through many roundings, of q, k, v, scores, weights and heads:
    it may be off by what two roundings make more than twice the error of the plain module in bfloat16."""
    values, gradients = reference(name, form, dtype, ranks)
    if dtype != torch.bfloat16:
        return dict.fromkeys([*values[rank], *gradients], TOLERANCE[dtype])
    rough_values, rough_gradients = reference(name, form, dtype, ranks, dtype)
    plain = {key: error(value, values[rank][key]) for key, value in rough_values[rank].items()}
    plain |= {key: error(value, gradients[key]) for key, value in rough_gradients.items()}
    return {key: 2 * TOLERANCE[dtype] + 2 * value for key, value in plain.items()}


def observe(module: RotatedMultiheadAttention, form: str, dtype: torch.dtype) -> dict:
    """Everything that one pass of this rank gives, gradients of parameters in full."""
    module.zero_grad()
    values = run(module, FORMS[form], module.ring.rank, dtype, dtype)
    return values | {key: full(parameter.grad) for key, parameter in module.named_parameters()}


def check(module: RotatedMultiheadAttention, name: str, form: str, dtype: torch.dtype) -> None:
    ring = module.ring
    values, gradients = reference(name, form, dtype, ring.size)
    allowed = tolerances(name, form, dtype, ring.size, ring.rank)
    actual = observe(module, form, dtype)
    assert actual["output"].dtype == dtype, f"output dtype: expected {dtype}, got {actual['output'].dtype}"
    expected = values[ring.rank] | gradients
    assert list(actual) == list(expected), "names of parameters"
    for key, right in expected.items():
        assert_same(actual[key], right, allowed[key], key)


def _passes(rank, ranks, transport, route, in_place, every):
    """`every`: of the cases, every second or third, another third on each number of ranks."""
    cases = Cases()
    forms = [(name, form) for name, form in product(MODULES, FORMS) if fits(make_module(name, DTYPES[0]), FORMS[form])]
    with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
        modules = {
            (name, dtype): RotatedMultiheadAttention.from_module(make_module(name, dtype), ring, in_place=in_place)
            for name, dtype in product(MODULES, DTYPES)
        }
        for dtype, (name, form) in list(product(DTYPES, forms))[ranks % every :: every]:
            with cases.case(f"{name} {dtype} in_place={in_place} {form}"):
                check(modules[name, dtype], name, form, dtype)
    cases.finish()


@pytest.mark.parametrize(
    ("ranks", "transport", "route", "in_place", "every"),
    [
        (1, "shm", "ring", False, 1),
        (2, "shm", "ring", False, 1),
        (3, "shm", "direct", False, 3),
        (4, "shm", "ring", False, 3),
        (2, "c10d", "ring", False, 5),
        (2, "c10d", "ring", True, 3),
        (3, "c10d", "ring", True, 5),
    ],
)
def test_one_pass(ranks, transport, route, in_place, every):
    run_ranks(_passes, ranks, transport, route, in_place, every)


def _controls(rank, ranks):
    """Each tolerance fails where a rank's part is missing, where gradients are summed, and without the mask."""
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


def _training(rank, ranks, transport, in_place):
    cases = Cases()
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        for name, dtype in product(TRAINED, (torch.float64, torch.float32)):
            plain = make_module(name, torch.float32).to(dtype)
            module = RotatedMultiheadAttention.from_module(plain, ring, in_place=in_place)
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
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport", "in_place"), [(2, "shm", False), (3, "c10d", True), (4, "shm", True)])
def test_parameters_after_adamw_steps(ranks, transport, in_place):
    run_ranks(_training, ranks, transport, in_place)


def _repeated(rank, ranks, transport, in_place):
    """Two forwards before one backward, with an evaluation and a pass of a copy between them; frozen parts."""
    cases = Cases()
    dtype, form = torch.float64, "all 2d"
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        for name in ("packed", "separate bias_kv"):
            plain = make_module(name, dtype)
            module = RotatedMultiheadAttention.from_module(plain, ring, in_place=in_place)
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
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport", "in_place"), [(2, "shm", False), (3, "c10d", True)])
def test_repeated_forwards_and_frozen_parts(ranks, transport, in_place):
    run_ranks(_repeated, ranks, transport, in_place)


def _half(rank, ranks):
    """Float32 parameters that compute in bfloat16, by autocast or by policy: gradients are float32."""
    cases = Cases()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
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
    cases.finish()


def test_bfloat16_of_float32_parameters():
    run_ranks(_half, 3)


def _dropout(rank, ranks):
    """The same random numbers as in the plain module."""
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
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


def test_dropout():
    run_ranks(_dropout, 2)


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


def _construct(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
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


def test_constructor_and_reset_are_those_of_the_plain_module():
    run_ranks(_construct, 3)


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
    nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(2, 8)])
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
