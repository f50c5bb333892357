"""One linear layer: the quantities of `measure.metrics` as actions to be timed, and checks of their results.

    x [T, K]   dy [T, N]   W [N, K], cut for R ranks into shards [N / R, K]   y [T, N]   dx [T, K]

The timed actions, for forward and backward (a step runs both):

    g1     y = x @ W.T                   dx = dy @ W, dW = dy.T @ x, in the dtype of x, as a plain layer computes them
    gr     the engine's `gemm`, which the operation itself calls, on R different shards in the order of the schedule:
           y[:, j] = x @ W_j.T; dx += dy[:, j] @ W_j in float32 for 16-bit dtypes, and dy[:, j].T @ x into float32
           partials; at the end the casts of dx and of this rank's gradient. No hops and no events; a second stream if
           the operation computes on two (`two_lanes`). g1 and gr write their results to new memory each time, as ov
           does: on a CPU this may cost page faults, which are not caused by rotation.
    c      passes of the engine over the same shards (`rtp_ext._native.Execution`) without computes. `check_hops`
           checks that they send as many hops and bytes as the operation.
    ov     `rotated_linear`; its backward by torch.autograd.grad
    base   the hops of c, then g1. The hops write to slots and g1 reads a separate whole weight, so that bytes and order
           are those of a gather. `base_by_collectives`: torch.distributed's all-gather (and, in backward,
           reduce-scatter of float32 gradients) on a separate group, and g1.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import rtp_ext.functional
from rtp_ext import _native
from rtp_ext._native import RotationError
from rtp_ext.measure.overlap_metrics import Times
from rtp_ext.measure.timing import Stopwatch, Together, renew, samples
from rtp_ext.ring import Prepared, Ring

__all__ = ["PASSES", "TimedLayer", "WrongResult", "layer_times", "together"]

PASSES = ("forward", "backward")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}  # relative to the largest value
SAMPLED = 32  # number of compared rows
GRADIENT = torch.float32  # default dtype of travelling partial gradients
INT8 = 2.0**-5  # tolerance of a gradient with contributions of 8 bits, relative to its largest value

_kernels = _native.kernels
_gemm = _kernels.gemm

# torch 2.14 renamed them
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WrongResult(RotationError):  # type: ignore[misc,valid-type]
    """A result is wrong; nothing is timed."""


def expect_same(actual: torch.Tensor, expected: torch.Tensor, what: str, rounded: float = 0.0) -> None:
    """Raises WrongResult if the error of `actual` exceeds the tolerance of its dtype and `rounded`."""
    tolerance = max(TOLERANCE[actual.dtype], rounded)
    scale = expected.abs().max().item()
    error = (actual.double() - expected).abs().max().item()
    if not error <= tolerance * scale:  # NaN is not
        raise WrongResult(
            f"{what}: expected an error of at most {tolerance:.1e} of {scale:.3g}, got {error:.3g}; nothing is timed"
        )


def _half(step: Any, rows: slice) -> slice:
    """Returns the rows of a gradient that a wgrad adds to: all, or one half if the gradient travels in halves."""
    middle = rows.start + (rows.stop - rows.start + 1) // 2
    return (rows, slice(rows.start, middle), slice(middle, rows.stop))[step.half]


class TimedLayer:
    """The tensors of one shape and number of tokens on one rank of `ring`, and the timed actions.

    Every action runs on the current CUDA stream, which must not change.
    """

    def __init__(
        self,
        ring: Ring,
        n: int,
        k: int,
        tokens: int,
        dtype: torch.dtype,
        seed: int = 0,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        if n % ring.size:
            raise ValueError(f"expected a number of rows that {ring.size} ranks divide, got {n}")
        self.ring, self.rows = ring, n // ring.size
        self.emulated = ring.mesh is None
        self.dtype = dtype
        owners = [ring.rank] * ring.size if self.emulated else range(ring.size)
        shards = [(self._random(seed + 1000 + owner, self.rows, k) * k**-0.5).to(dtype) for owner in owners]
        self.shard = shards[ring.rank].clone().requires_grad_()
        self.gradient_dtype = reduce_dtype or (torch.float64 if dtype == torch.float64 else GRADIENT)
        self.whole = torch.cat([self._arrived(shard) for shard in shards])
        self.prepared = Prepared()
        del shards
        self.x = self._random(seed + 2000 + ring.rank, tokens, k).to(dtype).requires_grad_()
        self.dy = self._random(seed + 3000 + ring.rank, tokens, n).to(dtype)
        self._inputs = self.x.detach()  # `gemm` and torch.mm with `out` do not support autograd
        self._y = torch.empty_like(self.dy)
        self._dx = torch.empty_like(self._inputs)
        self._dw: torch.Tensor | None = None
        sums = torch.float32 if dtype.itemsize == 2 else dtype
        self._sum = self._inputs.new_empty(self._inputs.shape, dtype=sums)
        self._partials: dict[str, torch.Tensor] = {}
        self._known_products: dict[str, list[tuple[str, int, tuple[Any, ...]]]] = {}
        self._output: torch.Tensor | None = None
        self._side: torch.cuda.Stream | None = None
        self.ov("forward")  # the ranks agree on the plan of this layer
        plan = ring.gate.plans["rotated_linear"]
        if plan.route == "gather":
            raise ValueError(f"expected a layer that rotates, got one that is gathered: {plan.reason}")
        room = ring.route_plan.has_room(ring.size, n * k * self.gradient_dtype.itemsize, plan.route, plan.group)
        self.direct = ring.gradients.direct(plan.route, self.gradient_dtype, room)
        self.halves = plan.halves and not self.direct
        self._options = ring.route_plan.rotation(
            "hops alone",
            route=plan.route,
            halves=plan.halves,
            slot_cap=ring.slot_cap,
            in_place=False,
            compute_dtype=dtype,
            reduce_dtype=self.gradient_dtype,
        )

    def _random(self, seed: int, *shape: int) -> torch.Tensor:
        device = self.ring.device
        return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed))

    # -- shards and their pieces -------------------------------------------------------------------------------------

    def chunks(self) -> list[slice]:
        """Returns the rows of each chunk of a shard: shards above the ring's slot cap travel in several chunks."""
        facts = _native.OperationFacts("linear", [_native.ParameterFacts((self.rows, self.shard.shape[1]))])
        local = self.ring.gradients.local_dtype(self.ring.hop_route, self.gradient_dtype)
        _, most = facts.chunks(1, max(self.dtype.itemsize, local.itemsize), self.ring.slot_cap)
        return [slice(first, min(first + most, self.rows)) for first in range(0, self.rows, most)]

    def _arrived(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a shard as all ranks, its owner too, compute with it: rounded as it travels."""
        if self.ring.options.travel is None or self.ring.size == 1:
            return shard
        if self.ring.options.travel == "bfloat16":
            return shard.bfloat16().to(shard.dtype)
        whole = torch.empty_like(shard)
        for chunk in self.chunks():
            sent = torch.empty(_kernels.quantized_bytes(shard[chunk].numel()), dtype=torch.uint8, device=shard.device)
            _kernels.quantize(sent, shard[chunk])
            _kernels.dequantize(whole[chunk], sent)
        return whole

    def _columns(self, owner: int, chunk: slice) -> slice:
        return slice(owner * self.rows + chunk.start, owner * self.rows + chunk.stop)

    def two_lanes(self, pass_: str) -> bool:
        """Returns whether the operation computes on two streams, which it does if GEMMs leave much of a GPU idle."""
        if self.ring.device.type == "cpu":
            return False
        processors = torch.cuda.get_device_properties(self.ring.device).multi_processor_count
        tokens, k = self.x.shape
        rows = max(chunk.stop - chunk.start for chunk in self.chunks())
        products = [(tokens, rows)] if pass_ == "forward" else [(tokens, k), (rows, k)]
        return any(_native.wastes_last_wave(*product, processors) for product in products)

    def _partial(self, name: str, chunk: slice) -> torch.Tensor:
        if name not in self._partials:
            self._partials[name] = torch.zeros_like(self.shard, dtype=self._options.local_dtype, requires_grad=False)
        return self._partials[name][chunk]

    def _executions(self, pass_: str) -> list[Callable[[], Any]]:
        """Returns functions that each start a pass of the engine, one for each chunk."""
        make: list[Callable[[], Any]] = []
        for chunk in self.chunks():
            shard = self.shard.detach()[chunk]
            shapes = [[list(shard.shape)] * self.ring.size]
            if pass_ == "forward":
                arguments: tuple[Any, ...] = (_native.Execution.forward, [shard], shapes, self._options)
            else:
                local = self._partial("gradient home", chunk)
                arguments = (_native.Execution.backward, [shard], shapes, [local], shapes, self._options, True, False)
                arguments += (self.halves,)
            make.append(functools.partial(self.ring.run, "hops alone", *arguments))
        return make

    # -- the actions -------------------------------------------------------------------------------------------------

    def g1(self, pass_: str) -> None:
        if pass_ == "forward":
            renew(self._y)
            torch.mm(self._inputs, self.whole.t(), out=self._y)
            return
        if self._dw is None:
            self._dw = torch.empty_like(self.whole)
        renew(self._dx, self._dw)
        torch.mm(self.dy, self.whole, out=self._dx)
        torch.mm(self.dy.t(), self._inputs, out=self._dw)

    def gr(self, pass_: str, only: str | None = None) -> None:
        """Runs the GEMMs of all shards. `only`: one kind of product, dgrad or wgrad, on one stream."""
        products = self._products(pass_)
        renew(*((self._y,) if pass_ == "forward" else (self._sum, self._partials["gradient home"])))
        if only is not None:
            for kind, _, operands in products:
                if kind == only:
                    _gemm(*operands)
            return
        side = any(lane for _, lane, _ in products)
        if side:
            self._side = self._side or torch.cuda.Stream(self.ring.device)
            self._side.wait_stream(torch.cuda.current_stream())
        for _, lane, operands in products:
            with torch.cuda.stream(self._side) if lane else contextlib.nullcontext():
                _gemm(*operands)
        if self._side is not None and side:
            torch.cuda.current_stream().wait_stream(self._side)
        if pass_ == "backward":
            self._sum.to(self.dtype)
            self._partials["gradient home"].to(self.dtype)

    def _products(self, pass_: str) -> list[tuple[str, int, tuple[Any, ...]]]:
        """Returns kind, stream and operands of every GEMM of a pass, cached to reduce host time between GEMMs."""
        if pass_ not in self._known_products:
            variants = {"halves": self.halves, "two_lanes": self.two_lanes(pass_)}
            wanted: dict[str, Any] = {name: True for name, on in variants.items() if on}
            if self.direct:
                wanted["gradient_route"] = "direct"
            schedule = _native.make_schedule(self.ring.size, self.ring.rank, pass_=pass_, **wanted)
            computes = [step for step in schedule.steps if step.action == "compute"]
            products = []
            for chunk in self.chunks():
                for number, step in enumerate(computes):
                    weight = self.whole[self._columns(step.owner, chunk)]
                    partials = None
                    if step.compute == "wgrad":
                        rows = _half(step, chunk)
                        arrived = None if step.gradient_in is None else self._partial(step.gradient_in, rows)
                        partials = arrived, self._partial(step.gradient_out, rows)
                    starts = number == 0 and chunk.start == 0
                    operands = self._operands(step, chunk, weight, partials, starts)
                    products.append((step.compute, step.lane, operands))
            self._known_products[pass_] = products
        return self._known_products[pass_]

    def _operands(self, step: Any, chunk: slice, weight: Any, partials: Any, starts: bool) -> tuple[Any, ...]:
        """Returns the arguments of `gemm`: out, in, a, b, alpha. `starts`: whether this is the first product of dx."""
        columns = self._columns(step.owner, chunk)
        if step.compute == "forward":
            return self._y[:, columns], None, self._inputs, weight.t(), 1.0
        if step.compute == "dgrad":
            return self._sum, None if starts else self._sum, self.dy[:, columns], weight, 1.0
        columns = self._columns(step.owner, _half(step, chunk))
        return partials[1], partials[0], self.dy[:, columns].t(), self._inputs, 1 / self.ring.size

    def c(self, pass_: str) -> None:
        for start in self._executions(pass_):
            execution = start()
            while execution.next() is not None:
                pass

    def ov(self, pass_: str) -> tuple[torch.Tensor, ...]:
        """Returns y of a forward under no_grad, or dx and the gradient of the local shard of a backward."""
        if pass_ == "forward":
            with torch.no_grad():
                return (self._linear(),)
        if self._output is None:
            self._output = self._linear()
        return torch.autograd.grad(self._output, (self.x, self.shard), self.dy, retain_graph=True)

    def _linear(self) -> torch.Tensor:
        options: dict[str, Any] = {"prepared": self.prepared, "reduce_dtype": self.gradient_dtype}
        return rtp_ext.functional.rotated_linear(self.x, self.shard, ring=self.ring, **options)

    def step(self) -> tuple[torch.Tensor, ...]:
        y = self._linear()
        return y.detach(), *torch.autograd.grad(y, (self.x, self.shard), self.dy)

    def base(self, pass_: str) -> None:
        self.c(pass_)
        self.g1(pass_)

    def base_by_collectives(self, pass_: str, group: dist.ProcessGroup) -> None:
        _all_gather(self.whole, self.shard.detach(), group=group)
        self.g1(pass_)
        if pass_ == "backward":
            assert self._dw is not None, "g1 makes it"
            summed = self._partial("gradient home", slice(0, self.rows))
            _reduce_scatter(summed, self._dw.to(summed.dtype), group=group)
            summed.div_(self.ring.size).to(self.dtype)

    def timed_pass(self, pass_: str) -> dict[str, float]:
        """Runs one pass step by step, with hops, and times every GEMM; returns microseconds by kind."""
        watch = Stopwatch(self.ring.device)
        if self.ring.device.type == "cuda":
            torch.cuda._sleep(10_000_000)  # about 5 ms: the host runs ahead, and no GEMM waits for its launch
        for chunk, start in zip(self.chunks(), self._executions(pass_), strict=True):
            execution = start()
            starts = chunk.start == 0
            while (step := execution.next()) is not None:
                weight, partials = None, None
                if step.compute == "wgrad":
                    arrived = execution.gradient_in()
                    partials = arrived[0] if arrived else None, execution.gradient_out()[0]
                else:
                    weight = execution.weight()[0]
                operands = self._operands(step, chunk, weight, partials, starts)
                watch.start(step.compute)
                _gemm(*operands)
                watch.stop()
                starts = False
        return watch.totals()

    # -- checks of results -------------------------------------------------------------------------------------------

    def check(self, direction: str) -> None:
        """Compares the operation, and the GEMMs of gr, with float64 at sampled rows. Collective; raises WrongResult."""
        tokens = torch.linspace(0, len(self.x) - 1, min(SAMPLED, len(self.x)), device=self.ring.device).long()
        whole = self.whole.double()
        if direction in ("forward", "step"):
            expected = self._inputs[tokens].double() @ whole.t()
            expect_same(self.ov("forward")[0][tokens], expected, "output")
            self.gr("forward")
            expect_same(self._y[tokens], expected, "output of the shard GEMMs")
        if direction == "forward":
            return
        dx, gradient = self.ov("backward") if direction == "backward" else self.step()[1:]
        expected = self.dy[tokens].double() @ whole
        expect_same(dx[tokens], expected, "input gradient")
        self.gr("backward")
        expect_same(self._sum[tokens].to(self.dtype), expected, "input gradient of the shard GEMMs")
        rows = torch.linspace(0, self.rows - 1, min(SAMPLED, self.rows), device=self.ring.device).long()
        rounded = TOLERANCE[self.gradient_dtype] if self.ring.gradient_travel is None else INT8
        expect_same(gradient[rows], self._expected_gradient(rows), "weight gradient", rounded)

    def _expected_gradient(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows of the averaged gradient of the local shard, float64. Collective."""
        owners = torch.arange(self.ring.size, device=rows.device) * self.rows
        columns = (owners.unsqueeze(1) + rows).flatten()
        parts = (self.dy[:, columns].double().t() @ self._inputs.double()).view(self.ring.size, len(rows), -1)
        if self.emulated:  # every owner is this rank
            return parts.mean(0)
        return self.ring.all_reduce(parts)[self.ring.rank] / self.ring.size

    def check_hops(self, passes: tuple[str, ...]) -> None:
        """Raises WrongResult unless `c` sends as many hops and bytes as the operation."""
        for pass_ in passes:
            self.ov(pass_)  # runs the forward before a backward
            asked, alone = self._sent_by(self.ov, pass_), self._sent_by(self.c, pass_)
            if asked != alone:
                raise WrongResult(
                    f"{pass_}: expected the hops and bytes of weights and gradients that the operation sends, "
                    f"{asked}, got {alone} where hops run alone"
                )

    def _sent_by(self, action: Callable[[str], Any], pass_: str) -> list[int]:
        before = self._sent()
        action(pass_)
        return [after - start for after, start in zip(self._sent(), before, strict=True)]

    def _sent(self) -> list[int]:
        ring = self.ring
        return [count(channel) for count in (ring.hops, ring.bytes_sent) for channel in ("weight", "gradient")]


def together(ring: Ring) -> Together:
    """Returns the ranks of a ring as timing needs them; an emulated ring has one."""

    def gather(values: list[float]) -> torch.Tensor:
        return torch.tensor(ring.exchange(values), dtype=torch.float64, device="cpu")

    return Together(ring.device, lambda: ring.exchange(None), gather)


def layer_times(layer: TimedLayer, seconds: float) -> tuple[Times, float]:
    """Returns the times of a step, in microseconds: medians of the slowest rank, and the noise, which is the largest
    distance between the 20th and 80th percentile of the GEMMs and of the rotation.

    Times each quantity for at least `seconds`. Raises WrongResult. Collective.
    """
    layer.check("step")
    layer.check_hops(PASSES)

    def both(action: Callable[[str], object]) -> None:
        for pass_ in PASSES:
            action(pass_)

    actions: dict[str, Callable[[], object]] = {"ov": layer.step}
    actions |= {name: functools.partial(both, getattr(layer, name)) for name in ("g1", "gr", "c", "base")}
    taken = samples(actions, together(layer.ring), seconds=seconds, iterations=3)
    g1, gr, c, ov, base = (taken[name].median for name in ("g1", "gr", "c", "ov", "base"))
    noise = max(taken[name].p80 - taken[name].p20 for name in ("g1", "gr", "ov"))
    return Times(g1, gr, c, ov, base, gr), noise
