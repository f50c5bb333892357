"""Gradients of gathered parameters in every dtype that has gradients: both parts of complex numbers, summed in float32
at least, and 64 bits where a parameter has them."""

import copy

import pytest
import torch
from harness import on_ranks
from reference import assert_same, differs, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext

# dtype, and the largest error relative to the mean in 64 bits; float8_e4m3fn has 4 significant bits
DTYPES = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.complex32: 2.0**-11,
    torch.complex64: 1e-6,
    torch.complex128: 1e-14,
    torch.float8_e4m3fn: 2.0**-4,
}


class Scaled(nn.Module):
    """Several parameters of one dtype, whose gradients are `seen` exactly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.linspace(-1, 1, 14, dtype=torch.float64).view(7, 2)
        for key, value in (("w", values), ("b", values[:2, 0])):
            self.register_parameter(key, nn.Parameter((value * (1 + 1j) if dtype.is_complex else value).to(dtype)))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        wide = torch.complex128 if self.w.is_complex() else torch.float64
        product = (self.w.to(wide).conj() * seen).sum() + (self.b.to(wide).conj() * seen[:2, 0]).sum()
        return product.real


def gradient_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank 0 has a gradient beside which those of others vanish in a sum in 16 bits; exact in `dtype`."""
    value = torch.full((7, 2), 256.0 if rank == 0 else 1.0, dtype=torch.float64)
    if dtype.itemsize >= 8 and dtype != torch.complex64:
        value = value + torch.tensor(2.0**-30)  # lost in 32 bits
    return value * (1 - 0.5j) if dtype.is_complex else value


@on_ranks(3)
def test_gradients_of_every_dtype(rank, ranks, cases):
    def check(what: str, found: torch.Tensor, dtype: torch.dtype, tolerance: float, exact: torch.Tensor) -> None:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        assert found.dtype == dtype, what
        assert_same(found.to(wide), exact, tolerance, what)

    for dtype, tolerance in DTYPES.items():
        exact = sum(gradient_of(each, dtype) for each in range(ranks)) / ranks
        seen = gradient_of(rank, dtype)
        if dtype.is_complex:
            assert differs(exact.real.to(exact.dtype), exact, 0.1), "control: without the imaginary part"
        model = rtp_ext.fully_rotate(Scaled(dtype), timeout=30.0)
        with cases.case(f"gathered, {dtype}"):
            model(seen).backward()
            for name, parameter in model.named_parameters():
                whole = rows_of_all(parameter.grad)
                check(name, whole, dtype, tolerance, exact if name == "w" else exact[:2, 0])
        if dtype not in (torch.float8_e4m3fn, torch.complex32):  # gloo gathers neither
            with cases.case(f"full_tensor, {dtype}"):
                wide = torch.complex128 if dtype.is_complex else torch.float64
                model.zero_grad()
                (model.w.full_tensor().to(wide).conj() * seen).sum().real.backward()
                check("w", full(model.w.grad), dtype, tolerance, exact)
        with cases.case(f"added later, {dtype}"):
            model.later = Scaled(dtype)
            model.register_forward_hook(lambda module, given, result: result + module.later(given[0]))
            model.zero_grad()
            model(seen).backward()
            check("later.w", model.later.w.grad, dtype, tolerance, exact)
        rtp_ext.ring_of(model).close()
    with cases.case("a reduce_dtype of 16 bits keeps both parts"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = rtp_ext.fully_rotate(Scaled(torch.complex64), mp_policy=policy, timeout=30.0)
        model(torch.full((7, 2), 2 - 1j, dtype=torch.complex128)).backward()
        assert bool((full(model.w.grad) == 2 - 1j).all())
        rtp_ext.ring_of(model).close()
    with cases.case("complex numbers beside real ones"):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4).double(), nn.LayerNorm(4).double())
        plain.append(Scaled(torch.complex128))
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=30.0)
        batches = [torch.randn(7, 4, dtype=torch.float64) for _ in range(ranks)]

        def loss(each: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return each[2](each[1](each[0](x))[:, :2])

        (sum(loss(plain, x) for x in batches) / ranks).backward()
        loss(model, batches[rank]).backward()
        for name, parameter in model.named_parameters():
            assert_same(full(parameter.grad), plain.get_parameter(name).grad, 1e-12, name)
        rtp_ext.ring_of(model).close()
    with cases.case("embeddings that stay whole"), pytest.raises(ValueError, match=r"complex64 for weight of a Embed"):
        rtp_ext.fully_rotate(nn.Embedding(4, 3, max_norm=1.0, dtype=torch.complex64), timeout=30.0)


def rows_of_all(gradient: torch.Tensor) -> torch.Tensor:
    """The whole gradient, of any dtype: gloo gathers no float8, and pickle no complex32."""
    mine = gradient.to_local().detach()
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine.view(torch.uint8))
    return torch.cat(every).view(mine.dtype)


@on_ranks(4)
def test_complex_gradients_of_replicas(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ring"))
    dims = rtp_ext.RotationDims(ring="ring", replicate="replica")
    for outer in ("AllReduce", "ZeroOuter"):
        for policy in (None, MixedPrecisionPolicy(reduce_dtype=torch.float32)):
            with cases.case(f"{outer} {policy}"):
                options = {"mesh": mesh, "dims": dims, "outer": getattr(rtp_ext.outer, outer)(), "mp_policy": policy}
                model = rtp_ext.fully_rotate(Scaled(torch.complex64), timeout=30.0, **options)
                model(gradient_of(rank, torch.complex64)).backward()
                exact = sum(gradient_of(each, torch.complex64) for each in range(ranks)) / ranks
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                optimizer.step()
                moved = Scaled(torch.complex64).w.detach() - exact.to(torch.complex64)
                assert_same(full(model.w.detach()), moved, 1e-6, "w after a step")
                rtp_ext.ring_of(model).close()
