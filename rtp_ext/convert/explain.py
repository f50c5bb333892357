"""rtp_ext.explain: the plan of a conversion, before and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from rtp_ext.convert.methods.fully_shard import explain_options
from rtp_ext.convert.plan.inspect_model import inspect_model
from rtp_ext.convert.plan.kept import Kept
from rtp_ext.convert.plan.request import Options, RotateKeywords, place_alone, state_in
from rtp_ext.convert.plan.rotation_plan import RotationPlan
from rtp_ext.convert.plan.traffic import RingFacts
from rtp_ext.convert.scopes import INFERENCE, is_inside, state_of
from rtp_ext.convert.validation import members_of, read_call, validate
from rtp_ext.options import RingOptions, takes
from rtp_ext.parameters.sharded_module import plain_class
from rtp_ext.ring import Ring

if TYPE_CHECKING:
    from typing_extensions import Unpack


@explain_options
@takes(RotateKeywords, Options, RingOptions)
def explain(
    module: nn.Module | list[nn.Module] | tuple[nn.Module, ...],
    *,
    ranks: int | None = None,
    rank: int = 0,
    device: torch.device | str | None = None,
    **keywords: Unpack[RotateKeywords],
) -> RotationPlan:
    """Returns the plan of a conversion: for every parameter its movement, cut, routes, dtypes, bytes, and reasons.

        plan = rtp_ext.explain(model, mesh=mesh, mp_policy=policy)
        print(plan)

    >>> plan = rtp_ext.explain(nn.Linear(8, 4, bias=False), ranks=2)
    >>> [(row.name, row.moved, row.shape, row.shard_sizes) for row in plan.parameters]
    [('weight', 'rotated', (4, 8), (2, 2))]

    Before conversion it returns the plan of `fully_rotate` with the same options. It changes and sends nothing, and
    parameters may be on the meta device. Routes are then those of ranks on one host, unless `mesh` is a Ring. For a
    converted model, or a part that was the argument of `fully_rotate`, it reads the plan from the modules: it ignores
    the options, leaves out bundles that an adapter has ended, and shows layers that the route planner gathers on route
    `gather`. It does the same for a model that `rotate_for_inference` has converted; the bytes are then those that one
    forward pulls.

    Args:
        module: a model, on any device; or a list of modules as `fully_rotate` takes it.
        mesh, dims, outer, mp_policy, offload_policy, ignored_params, gather, in_place, bundle: see `fully_rotate`.
        loss_head, frozen, route, gradient_route, gradient_travel, buffers, group, collective, embedding, transport,
            travel, timeout: as there.
        ranks, rank: for a plain model and a ring that does not exist: its size, and the rank whose bytes are counted.
            Default: those of `mesh`, or of the default process group.
        device: the device type of such a ring; default: that of the parameters, `cuda` if these are on meta.

    Returns a RotationPlan: `str(plan)` is a table, `plan.to_dict()` values for JSON, `plan.parameters` the rows, and
    `plan.totals` sums in bytes.

    Raises the errors that `fully_rotate` raises before it makes a ring, and ValueError for a rank outside of the ring,
    for `ranks` together with `mesh` or a converted model, and for a module inside a converted model.
    """
    options = Options.of(keywords)
    members = members_of(module)
    for name, given in (("ranks", ranks), ("rank", rank)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
            raise TypeError(f"explain: expected {name} to be an integer, got {given!r:.100}")
    if isinstance(module, nn.Module) and is_inside(module):
        if ranks is not None or rank:
            raise ValueError(
                f"explain: expected a plain model for ranks={ranks}, rank={rank}, got a {type(module).__name__} that "
                "fully_rotate has converted, whose ring is known"
            )
        if state_of(module) is None:
            raise ValueError(
                f"explain: expected a model, or a module that was the argument of fully_rotate, got a "
                f"{type(module).__name__} inside a converted model: pass that model"
            )
        return _explain_converted(module, state_in(module).ring)
    if isinstance(module, nn.Module) and INFERENCE in module.__dict__:
        return _explain_converted(module, module.__dict__[INFERENCE].ring)
    alone = None
    if ranks is None and rank:
        raise ValueError(f"explain: expected ranks together with rank, got rank={rank} alone")
    if ranks is not None:
        if options.mesh is not None or options.dims is not None:
            raise ValueError(f"explain: expected ranks or a mesh, got ranks={ranks} and mesh={options.mesh!r:.100}")
        if ranks < 1 or not 0 <= rank < ranks:
            raise ValueError(f"explain: expected ranks >= 1 and 0 <= rank < ranks, got ranks={ranks}, rank={rank}")
        kind = torch.device(device).type if device is not None else _device_type(members)
        alone = place_alone(ranks, rank, kind, options)
    request = read_call(module, options, alone)
    plan = inspect_model(request)
    validate(plan, request)
    return plan


def _device_type(members: list[nn.Module]) -> str:
    kinds = {parameter.device.type for each in members for parameter in each.parameters()} - {"meta"}
    return next(iter(sorted(kinds)), "cuda")


def _explain_converted(module: nn.Module, ring: Ring) -> RotationPlan:
    facts = RingFacts.of(ring)
    kept = Kept(module, facts)
    modules = (kept.module(name, part) for name, part in module.named_modules())
    order = {name: place for place, name in enumerate(kept.names.values())}
    return RotationPlan(
        ring=facts,
        modules=tuple(each for each in modules if each is not None),
        bundles=tuple(sorted(kept.bundles(), key=lambda bundle: (order[bundle.name], bundle.kind))),
        fused=tuple(kept.fused()),
        kind=plain_class(module).__name__,
    )
