"""Ways to train a model on several ranks, behind one interface: a name in `STRATEGIES`, and `Trainer`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import rtp_ext
from shared.agreement import signature
from shared.optimizers import make_optimizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Strategy:
    """The conversion of a plain model to one that trains on a mesh.

    `convert(model, mesh, policy)` returns the model to call; where it rotates, further options are those of
    fully_rotate. `policy` is None where all is float32. `follows_policy`: 16-bit compute comes from the policy (16-bit
    copies of float32 parameters), and so does what gradients are reduced in, and not from autocast. `one_process`: a
    single process trains on the batches of all ranks. `alone`: every rank trains a model of its own on its own batch.
    `whole_batch`: every rank computes with the batches of all ranks, and with its part of the weights. `model_method`:
    what a model must have for it. `language`: only for causal language models of the transformers package. `replicas`:
    of the weights, each of them spread over as many ranks. `exact`: is given no options of what travels, so that it
    stands beside those that are. `muon`: a key of `MUONS`, the one of its hidden matrices; None: it is not compared
    with Muon. `only_muon`: with AdamW it would be another strategy of the list. `ways`: options of fully_rotate about
    what travels that a strategy with `exact` has of its own; those of frozen weights are compared on adapters only, a
    recipe without adapters only.
    `package`: what it needs besides torch and rtp_ext. Such a strategy is compared where it is named, in float32, and
    has a trainer of its own, which converts the model (shared/peers.py).
    """

    convert: Callable[..., nn.Module]
    follows_policy: bool = False
    one_process: bool = False
    alone: bool = False
    whole_batch: bool = False
    model_method: str | None = None
    language: bool = False
    replicas: int = 1
    exact: bool = False
    muon: str | None = None
    only_muon: bool = False
    ways: Mapping[str, str] = field(default_factory=dict)
    package: str | None = None

    @property
    def every_batch(self) -> bool:
        """Whether one rank computes with the batches of all."""
        return self.one_process or self.whole_batch

    def refusal(self, model: type[nn.Module], optimizer: str = "adamw", lora: int | None = None) -> str | None:
        """Why models of this class cannot be trained so with this optimizer, or None. `lora`: the rank of adapters."""
        if lora is None and "frozen" in self.ways:
            return "it needs --lora"
        if lora is not None and "recipe" in self.ways:
            return "adapters are not compared in 8 bits"
        if lora is not None and self.package is not None:
            return f"adapters are not compared with {self.package}"
        if lora is not None and self.model_method is not None:
            return f"{self.model_method} has no plan for adapters"
        if optimizer == "muon" and self.muon is None:
            return "it is not compared with Muon"
        if optimizer != "muon" and self.only_muon:
            return "it needs --optimizer muon"
        if self.model_method is not None and not hasattr(model, self.model_method):
            return f"{model.__name__} has no {self.model_method}"
        if self.language and not getattr(model, "causal_head", False):
            return f"{model.__name__} has no vocabulary head of the transformers package"
        return None


def _rotate(**choices: Any) -> Callable[..., nn.Module]:
    def convert(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None, **rotation: Any) -> nn.Module:
        options = {} if policy is None else {"mp_policy": policy}
        return rtp_ext.fully_rotate(model, mesh=mesh, **choices, **rotation, **options)

    return convert


def _rotate_on(**options: Any) -> Callable[..., nn.Module]:
    def convert(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None, **ways: Any) -> nn.Module:
        return _rotate()(model, rtp_ext.Ring(mesh, **options, **ways), policy)

    return convert


def _shard(*, reshard: bool | None = None) -> Callable[[nn.Module, DeviceMesh, MixedPrecisionPolicy | None], nn.Module]:
    """`reshard`: whether weights are freed after forward; None: torch's default, all blocks but not the root."""

    def convert(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None) -> nn.Module:
        options: dict[str, Any] = {"reshard_after_forward": reshard}
        options |= {} if policy is None else {"mp_policy": policy}
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return convert


def _in_replicas(mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    names = ("replicas", "ring")
    return init_device_mesh(mesh.device_type, (replicas, mesh.size() // replicas), mesh_dim_names=names)


def _rotate_replicas(
    model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None, **rotation: Any
) -> nn.Module:
    dims = rtp_ext.RotationDims(ring="ring", replicate="replicas")
    return _rotate(dims=dims)(model, _in_replicas(mesh, 2), policy, **rotation)


def _shard_replicas(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None) -> nn.Module:
    return _shard()(model, _in_replicas(mesh, 2), policy)


def _parallelize(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None) -> nn.Module:
    model.parallelize(mesh)
    return model


def _replicate(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)


def _as_it_is(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None) -> nn.Module:
    return model


STRATEGIES = {
    "rtp": Strategy(_rotate(), follows_policy=True, muon="auto"),
    "rtp-gram": Strategy(_rotate(), follows_policy=True, muon="gram", only_muon=True),
    "rtp-whole": Strategy(_rotate(), follows_policy=True, muon="whole", only_muon=True),
    "rtp-bf16": Strategy(_rotate(), follows_policy=True, exact=True, ways={"travel": "bfloat16"}),
    "rtp-int8": Strategy(_rotate(), follows_policy=True, exact=True, ways={"travel": "int8"}),
    "rtp-rowwise": Strategy(_rotate(), follows_policy=True, exact=True, ways={"recipe": "float8_rowwise"}),
    "rtp-nf4": Strategy(_rotate(), follows_policy=True, exact=True, ways={"frozen": "nf4"}),
    "rtp-c10d": Strategy(_rotate(transport="c10d"), follows_policy=True),
    "rtp-exact": Strategy(_rotate(), follows_policy=True, exact=True),
    "rtp-flat": Strategy(_rotate(route="ring"), follows_policy=True),
    "rtp-inplace": Strategy(_rotate(in_place=True), follows_policy=True),
    "rtp-unbundled": Strategy(_rotate(bundle=False), follows_policy=True),
    "rtp-recompute": Strategy(_rotate(bundle="recompute"), follows_policy=True),
    "rtp-lean": Strategy(_rotate_on(buffers="lean"), follows_policy=True),
    "rtp-unkept": Strategy(_rotate_on(keep_recomputed=False), follows_policy=True),
    "rtp-fused": Strategy(_rotate(bundle="recompute", loss_head="fused"), follows_policy=True, language=True),
    "rtp-2rings": Strategy(_rotate_replicas, follows_policy=True, replicas=2),
    "fsdp2": Strategy(_shard(), follows_policy=True, muon="stock"),
    "fsdp2-gathered": Strategy(_shard(), follows_policy=True, muon="gathered", only_muon=True),
    "fsdp2-noreshard": Strategy(_shard(reshard=False), follows_policy=True),
    "hsdp": Strategy(_shard_replicas, follows_policy=True, replicas=2),
    "ddp": Strategy(_replicate, muon="stock"),
    "tp": Strategy(_parallelize, whole_batch=True, model_method="parallelize"),
    "deepspeed": Strategy(_as_it_is, package="deepspeed"),
    "simplefsdp": Strategy(_as_it_is, package="torchtitan"),
    "simplefsdp-compiled": Strategy(_as_it_is, package="torchtitan"),
    "upstream": Strategy(_as_it_is, package="the code of the paper's authors"),
    "single": Strategy(_as_it_is, one_process=True, muon="stock"),
    "none": Strategy(_as_it_is, alone=True, muon="stock"),
}


class Trainer:
    """A model, its optimizer, and the training step.

    Args:
        strategy: a key of `STRATEGIES`.
        build: makes the plain model; called under `seed`, on the CPU, so that every strategy and rank starts from the
            same weights.
        mesh: the ranks, one-dimensional.
        device: where the model lives.
        dtype: a key of `DTYPES`; parameters are float32 either way.
        lr: learning rate.
        optimizer: one of `OPTIMIZERS`.
        reduce_dtype: a key of `DTYPES`; of gradients, where a policy says it.
        rotation: further options of fully_rotate, for strategies that rotate.
    """

    def __init__(
        self,
        strategy: str,
        build: Callable[[], nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        dtype: str,
        lr: float,
        seed: int,
        optimizer: str = "adamw",
        reduce_dtype: str = "float32",
        rotation: Mapping[str, Any] | None = None,
    ) -> None:
        kind = STRATEGIES[strategy]
        compute_dtype = DTYPES[dtype]
        policy = None
        self._autocast: torch.dtype | None = None
        narrow = compute_dtype != torch.float32
        if kind.follows_policy and (narrow or reduce_dtype != "float32"):
            cast = compute_dtype if narrow else None
            policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=DTYPES[reduce_dtype])
        elif narrow:
            self._autocast = compute_dtype
        torch.manual_seed(seed)
        self.strategy = strategy
        self.device = device
        self.ranks = mesh.size()
        options = dict(rotation or {}) if strategy.startswith("rtp") else {}
        self.model = self._converted(kind.convert(build().to(device), mesh, policy, **options), mesh)
        self.optimizer = make_optimizer(optimizer, self.model, kind.muon, lr)
        self.ring = rtp_ext.ring_of(self.model) if strategy.startswith("rtp") else None

    @classmethod
    def around(
        cls, strategy: str, model: nn.Module, device: torch.device, *, lr: float, autocast: torch.dtype | None
    ) -> "Trainer":
        """Returns a trainer of a converted model. `autocast`: its dtype; None: no autocast."""
        trainer = cls.__new__(cls)
        trainer.strategy, trainer.model, trainer.device, trainer._autocast = strategy, model, device, autocast
        trainer.optimizer = make_optimizer("adamw", model, None, lr)
        trainer.ring = rtp_ext.ring_of(model) if strategy.startswith("rtp") else None
        return trainer

    def step(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        keep_gradients: bool = False,
        phase: Phase = lambda name: nullcontext(),
    ) -> torch.Tensor:
        """Runs one training step on this rank's batch. Returns its loss before the update, a detached scalar.

        Args:
            keep_gradients: zero the gradients and keep their memory, instead of freeing them.
            phase: entered around `forward_backward` and `optimizer`.
        """
        self.optimizer.zero_grad(set_to_none=not keep_gradients)
        with phase("forward_backward"):
            with self._casting():
                loss = self.model(inputs, targets)
            self._backward(loss)
        with phase("optimizer"):
            self.optimizer.step()
        return loss.detach()

    def _converted(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Returns the model to call, of what the strategy's `convert` made."""
        return model

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def signatures(self) -> list[list[float]]:
        """Returns the signatures of the last gradients, by parameter. Collective."""
        return list(map(signature, self.model.parameters()))

    def _casting(self) -> AbstractContextManager[None]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._autocast)

    def parameter_tensors(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def gradient_tensors(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def close(self) -> None:
        """Ends the ring, if there is one. All ranks call it."""
        if self.ring is not None:
            self.ring.close()
