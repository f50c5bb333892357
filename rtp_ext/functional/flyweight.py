"""R virtual copies of one small module: the module runs with every shard of its parameters in turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from rtp_ext import _native
from rtp_ext.functional._call import Call, ShardedParameter, needs_gradients, prepare
from rtp_ext.functional._copies import Copies, Cut, Modes, random_state, set_random_state
from rtp_ext.functional._driven import accumulation_dtype, add_scaled, drive
from rtp_ext.functional._operation import Operation
from rtp_ext.functional._rotated import Rotated
from rtp_ext.parameters.sharding import local_shard, make_contiguous
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.autograd import storing_modes
from rtp_ext.words import Combine


class _Sum:
    """A sum in the accumulation dtype that owns its memory."""

    value: Tensor | None = None

    def add(self, term: Tensor) -> None:
        if self.value is None:
            self.value = term.detach().to(accumulation_dtype(term.dtype), copy=True)
        else:
            self.value.add_(term)


class Flyweight(Operation):
    """Virtual copies. Inputs: tensors of the arguments, then whole parameters. Settings: the Copies of one call."""

    key = label = "flyweight"

    @staticmethod
    def forward(call, copies, inputs, parameters):
        ring, device = call.ring, call.ring.device
        inputs, replicated, params = copies.split([*inputs, *parameters])
        outputs: dict[int, Tensor] = {}
        total = _Sum()
        shapes = copies.shapes(copies.cuts, ring)

        def compute(execution: Any, step: Any) -> None:
            owner = step.owner
            if copies.skips(owner):
                return
            shards = execution.weight()
            if copies.keeps:
                copies.states[owner] = random_state(device)
            y = copies.within(owner, replicated, shards, lambda: copies.output(inputs))
            if copies.combine == "cat":
                received = {shard.untyped_storage().data_ptr() for shard in shards}
                outputs[owner] = y.clone() if y.untyped_storage().data_ptr() in received else y
                return
            if total.value is not None and y.shape != total.value.shape:
                raise ValueError(
                    f"{copies.name}: expected outputs of one shape to sum, got {tuple(total.value.shape)} and "
                    f"{tuple(y.shape)} of shard {owner}"
                )
            total.add(y)
            outputs[owner] = y.new_empty(0)

        drive(call, _native.Execution.forward, (params, shapes, call.options), compute)
        states = random_state(device) if copies.stored else ()
        if total.value is not None:
            return [total.value.to(next(iter(outputs.values())).dtype), *states]
        parts = [outputs[owner] for owner in sorted(outputs)]
        copies.extents.update({owner: y.shape[copies.dim] for owner, y in outputs.items()})
        return [torch.cat(parts, copies.dim), *states]

    @staticmethod
    def after(call: Call, settings: Copies, kept: Sequence[Tensor]) -> None:
        if kept:  # a recomputation that reuses saved outputs draws no numbers; later draws must be the same
            set_random_state(tuple(kept), call.ring.device)

    @staticmethod
    def backward(call, copies, gradients, inputs, parameters, kept, needs):
        (dy,), ring, device = gradients, call.ring, call.ring.device
        inputs, replicated, params = copies.split([*inputs, *parameters])
        _, needs_replicated, needs_shard = copies.split(needs)
        travelling = [index for index, needed in enumerate(needs_shard) if needed]
        local = [params[i].new_empty(params[i].shape, dtype=call.options.local_dtype) for i in travelling]
        shapes = [copies.shapes(cuts, ring) for cuts in (copies.cuts, [copies.cuts[i] for i in travelling])]
        sums = [_Sum() for _ in (*inputs, *replicated)]
        pending: dict[int, list[Tensor | None]] = {}

        def dgrad(execution: Any, owner: int) -> None:
            leaves = [
                tensor.detach().requires_grad_(needed)
                for tensor, needed in zip((*inputs, *replicated, *execution.weight()), needs, strict=True)
            ]
            set_random_state(copies.states[owner], device)
            dy_of_copy = dy
            if copies.combine == "cat":
                start = sum(extent for other, extent in copies.extents.items() if other < owner)
                dy_of_copy = dy.narrow(copies.dim, start, copies.extents[owner])
            found = copies.gradients(owner, leaves, needs, dy_of_copy)
            shares, of_shards = found[: len(sums)], found[len(sums) :]
            for total, share in zip(sums, shares, strict=True):
                if share is not None:
                    total.add(share)
            pending[owner] = [of_shards[i] for i in travelling]

        def wgrad(execution: Any, owner: int) -> None:
            out = execution.gradient_out()
            arrived = execution.gradient_in() or [None] * len(out)
            for sum_out, sum_in, share in zip(out, arrived, pending.pop(owner), strict=True):
                add_scaled(sum_out, sum_in, share, 1.0 / ring.size)

        def compute(execution: Any, step: Any) -> None:
            if copies.skips(step.owner):
                pending[step.owner] = [None] * len(travelling)
            if step.compute == "wgrad":
                wgrad(execution, step.owner)
            elif not copies.skips(step.owner):
                dgrad(execution, step.owner)

        outer = random_state(device)
        try:
            arguments = (params, shapes[0], local, shapes[1], call.options, True, True)
            drive(call, _native.Execution.backward, arguments, compute)
        finally:
            set_random_state(outer, device)

        totals = [
            None if total.value is None else total.value.to(tensor.dtype)
            for total, tensor in zip(sums, (*inputs, *replicated), strict=True)
        ]
        of_inputs, of_replicated = totals[: len(inputs)], totals[len(inputs) :]
        of_local_shards: list[Tensor | None] = [None] * len(params)
        for index, gradient in zip(travelling, local, strict=True):
            of_local_shards[index] = gradient
        return *of_inputs, *_average(call, replicated, of_replicated, needs_replicated), *of_local_shards


def _average(
    call: Call, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients of replicated parameters, averaged over the ring. Collective."""
    averaged: list[Tensor | None] = [None] * len(parameters)
    wanted = [index for index, needed in enumerate(needs) if needed]
    if not wanted:
        return averaged
    counts = [parameters[index].numel() for index in wanted]
    flat = torch.zeros(sum(counts), dtype=call.reduce_dtype, device=call.ring.device)
    sections = flat.split(counts)
    for section, index in zip(sections, wanted, strict=True):
        gradient = gradients[index]
        if gradient is not None:
            section.copy_(gradient.reshape(-1))
    call.ring.all_reduce(flat, f"the replicated gradients of {call.name}").div_(call.ring.size)
    for section, index in zip(sections, wanted, strict=True):
        averaged[index] = section.view(parameters[index].shape).to(parameters[index].dtype, copy=True)
    return averaged


def rotated_flyweight(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ring: Ring,
    shard_dims: Mapping[str, int | None],
    combine: Combine = "cat",
    dim: int = -1,
    added_once: Collection[str] = (),
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_flyweight",
) -> Tensor:
    """Runs `module` once for every rank j of the ring, with the shards of rank j as its parameters.

    Symbols: R = ring.size, M_j = the module with its parameters replaced by shard j, a virtual copy.

        returns  cat(M_0(*args), ..., M_{R-1}(*args), dim) or their sum, kept in float32 where the output has 16 bits

        forward  every copy runs while its shard visits; no activations are saved
        dgrad    M_j runs again from the visiting shard, with the random numbers of its forward, and autograd computes
                 the gradients of inputs and shard. Input gradients are summed over j
        wgrad    dW_j = 1/R sum_ranks dM_j / dW_j      (travels with the weights and ends at its owner)

    Args:
        module: its forward takes its sizes from its parameters, not from attributes such as num_heads; returns one
            tensor; and changes neither its arguments nor its buffers. Its own parameters are not read.
        parameters: by name, this rank's local shard of every parameter of the module, or the whole parameter if it is
            not cut.
        args, kwargs: any structure; its tensors may require gradients.
        shard_dims: the dimension that each parameter is cut along by the chunk rule; None: whole on every rank, and an
            all-reduce averages its gradient.
        combine, dim: "cat" along `dim` of the outputs, or "sum".
        added_once: parameters that the module adds to its output, as a bias. A sum of copies would add a whole bias R
            times, and a shard does not have its shape: copy j gets a whole bias that is zero outside shard j.
        compute_dtype: shards are cast to it before they travel; default: their own. Under autocast they travel in
            their own dtype and the operations of the module cast them, as without a ring.
        reduce_dtype, name: as in `rotated_linear`.

    A copy does not run if all its shards are empty. Raises ValueError or TypeError if names, shapes, dtypes or
    outputs are not as expected, RingTimeout if a neighbour does not answer. Collective.
    Source: RTP, arXiv 2311.01635 (flyweight initialisation).
    """
    if ring.host_memory is not None:
        raise ValueError(
            f"{name}: expected a ring whose shards are on its device, got one with offload_policy="
            f"{ring.offload_policy}, which cannot be combined with copies of a module"
        )
    expected = {key for key, _ in module.named_parameters()}
    check_copies(name, expected, shard_dims, combine, added_once)
    if set(parameters) != expected:
        raise ValueError(f"{name}: expected parameters {sorted(expected)}, got {sorted(parameters)}")
    names = [key for key, cut in shard_dims.items() if cut is not None]
    replicated = [key for key, cut in shard_dims.items() if cut is None]
    call = Call.of(
        parameters[names[0]],
        ring=ring,
        name=name,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        autocasts=False,
    )
    params = []
    for key in names:
        dim_cut = _dimension(call, key, parameters[key], shard_dims[key])
        params.append(ShardedParameter(key, parameters[key], dim_cut, parameters[key].dim()))
        if parameters[key].dtype != parameters[names[0]].dtype:
            raise TypeError(
                f"{name}: expected parameters of one dtype, got {parameters[names[0]].dtype} of {names[0]} and "
                f"{parameters[key].dtype} of {key}"
            )
    leaves, structure = tree_flatten((tuple(args), dict(kwargs or {})))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    inputs = [leaves[place] for place in places]
    # one flag for all inputs: ranks may differ in the inputs of a batch and in those that require gradients
    needs = [any(needs_gradients(*inputs)), *needs_gradients(*(parameters[key] for key in (*names, *replicated)))]
    facts = (
        ("gradients of inputs", needs[0]),
        (f"gradients of {', '.join(replicated)}", needs_gradients(*(parameters[key] for key in replicated))),
        ("whole", tuple([(key, tuple(parameters[key].shape), parameters[key].dtype) for key in replicated])),
        ("combine", combine),
        ("added once", tuple(sorted(added_once))),
    )

    def derive(shapes: list[tuple[int, ...]]) -> list[Cut]:
        return [
            Cut(
                param.what, whole, param.dim, _native.shard_sizes(whole[param.dim], ring.size), param.what in added_once
            )
            for param, whole in zip(params, shapes, strict=True)
        ]

    cuts = prepare(call, prepared, Flyweight.key, params, [], facts, derive)
    copies = Copies(
        name,
        module,
        cuts,
        replicated,
        [None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        places,
        structure,
        combine,
        dim,
        any(needs),
        Modes.now(module, ring.device),
        bool(storing_modes()),
    )
    whole_parameters = [local_shard(parameters[key]).to(call.compute_dtype) for key in replicated]
    for param in params:
        make_contiguous(param.tensor)
    shards = [local.contiguous() for local in call.local_shards()]
    return Rotated.apply(Flyweight, call, copies, *inputs, *whole_parameters, *shards)[0]


def check_copies(
    name: str,
    parameters: Collection[str],
    shard_dims: Mapping[str, int | None],
    combine: str,
    added_once: Collection[str],
) -> None:
    """Raises ValueError if a module with these parameters cannot be cut and combined as requested."""
    if combine not in get_args(Combine):
        raise ValueError(f"{name}: expected combine 'cat' or 'sum', got {combine!r}")
    if set(shard_dims) != set(parameters):
        raise ValueError(
            f"{name}: expected shard_dims to name the parameters {sorted(parameters)}, got {sorted(shard_dims)}"
        )
    cut = [key for key, dim in shard_dims.items() if dim is not None]
    if not cut:
        raise ValueError(f"{name}: expected a parameter to cut, got shard_dims {dict(shard_dims)}")
    if set(added_once) - set(cut) or (added_once and combine != "sum"):
        raise ValueError(
            f"{name}: expected added_once to name parameters of a sum that are cut, got {sorted(added_once)} with "
            f"combine {combine!r} and cut parameters {cut}"
        )


def _dimension(call: Call, key: str, shard: Tensor, dim: int | None) -> int:
    assert dim is not None
    if not isinstance(shard, Tensor) or not -shard.dim() <= dim < shard.dim():
        raise ValueError(
            f"{call.name}: expected a dimension of {key} {tuple(getattr(shard, 'shape', ()))} to cut, got {dim}"
        )
    return dim % shard.dim()
