"""The optimizers of the comparison of strategies: AdamW, and Muon for hidden matrices beside AdamW for the rest."""

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import _muon

import rtp_ext.optim
from rtp_ext.optim.newton_schulz import Iteration
from shared.launch import Place, gather

OPTIMIZERS = ("adamw", "muon")


def _iterate(update: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """torch's iteration, in the dtype of the matrix [m, n]. Of a DTensor each product is one of DTensors."""
    return Iteration(tuple(coefficients), steps, eps).on_matrix(update)


def _iterate_gathered(update: torch.Tensor, *settings: Any) -> torch.Tensor:
    """The same; every rank gathers a DTensor and iterates the whole matrix. Returns this rank's part of the result."""
    if not isinstance(update, DTensor):
        return _iterate(update, *settings)
    mesh = update.device_mesh
    whole = _iterate(update.full_tensor(), *settings)
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=update.placements)


class StockMuon(torch.optim.Muon):
    """torch.optim.Muon with the iteration in float32 instead of bfloat16.

    In bfloat16 its updates differ by 1 % to 30 % from those in float32 (docs/optimizers.md): strategies would train
    differently, and their times would differ by the rates of two dtypes; either is the faster one on some CPUs.
    """

    iterate = staticmethod(_iterate)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", self.iterate):
            return super().step(closure)


class GatheredMuon(StockMuon):
    """The same; every rank gathers each matrix, iterates it, and keeps its part."""

    iterate = staticmethod(_iterate_gathered)


MUONS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "auto": rtp_ext.optim.Muon,
    "gram": partial(rtp_ext.optim.Muon, exchange="gram"),
    "whole": partial(rtp_ext.optim.Muon, exchange="whole"),
    "stock": StockMuon,
    "gathered": GatheredMuon,
}


class Pair:
    """Muon for the hidden matrices of a model, and AdamW for its other parameters, with one learning rate.

    muon: a key of `MUONS`.
    """

    def __init__(self, model: nn.Module, muon: str, lr: float) -> None:
        hidden, rest = rtp_ext.optim.matrices(model)
        # with updates as large as AdamW's, so that its learning rate fits
        self.muon = MUONS[muon](hidden, lr=lr, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(parameter_groups(rest), lr=lr)
        self.matrix_bytes = sum(parameter.numel() * parameter.element_size() for parameter in hidden)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.muon.param_groups + self.adamw.param_groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return {**self.muon.state, **self.adamw.state}

    @property
    def bytes_sent(self) -> int | None:
        """What this rank has sent for updates, by the count of the optimizer; None if it has no count."""
        return self.muon.bytes_sent() if isinstance(self.muon, rtp_ext.optim.Muon) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in (self.muon, self.adamw):
            each.zero_grad(set_to_none)

    def step(self) -> None:
        for each in (self.muon, self.adamw):
            each.step()


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters for an optimizer: DTensors and plain tensors apart, since one fused loop cannot take both."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{"params": parameters} for parameters in kinds.values()]


def make_optimizer(name: str, model: nn.Module, muon: str | None, lr: float) -> torch.optim.Optimizer | Pair:
    """Returns an optimizer of `OPTIMIZERS` for all parameters of a model, with torch's defaults except for `lr`.

    muon: a key of `MUONS`, read for `muon` only.
    """
    if name == "adamw":
        return torch.optim.AdamW(parameter_groups(model.parameters()), lr=lr)
    if muon is None:
        raise ValueError(f"optimizer {name}: expected a strategy with one of {', '.join(MUONS)}, got none")
    return Pair(model, muon, lr)


def muon_fields(
    kind: str | None, optimizer: torch.optim.Optimizer | Pair | None, steps: int, sent: list[int], place: Place
) -> dict[str, Any]:
    """Returns the fields of a row about Muon, with bytes per step of the rank or host that sends most. Collective.

    kind: a key of `MUONS`.
    optimizer: None on ranks without work.
    sent: bytes that left this host during the optimizer at every step, if they were counted.
    """
    known = isinstance(optimizer, Pair)
    own = optimizer.bytes_sent if known else None
    mine = [float(optimizer.matrix_bytes if known else 0), (own or 0) / max(steps, 1), statistics.median(sent or [0])]
    matrices, exchanged, counted = gather(mine, place).amax(0).tolist()
    return {
        "muon": kind,
        "matrix_bytes": round(matrices),
        "exchange_bytes": None if own is None else exchanged,
        "optimizer_sent_bytes": round(counted) if sent else None,
    }
