"""The options of a ring and of its transports: types, defaults, meanings, and the checks that need no other rank.

Loads no torch, so that the planner and the command line read them too.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar, get_args

from rtp_ext._rules import SLOT_CAP, travel_bytes
from rtp_ext.words import (
    Budget,
    CeMode,
    EmbeddingWay,
    GradientRoute,
    GradientTravel,
    Graphs,
    Route,
    Transport,
    Travel,
)

TRANSPORTS: tuple[str, ...] = get_args(Transport)
ROUTES: tuple[str, ...] = get_args(Route)


def has_collectives(transport: str) -> bool:
    """Returns whether a transport, or on two levels the one between hosts, has an all-gather and a reduce-scatter."""
    return transport.rpartition("+")[2] in ("nccl", "c10d")


PARTIAL_SUMS = (
    "expected gradient_route direct where gradients travel in int8: a partial sum that is "
    "quantized again at every rank loses more with each"
)


@dataclass(frozen=True)
class TransportOptions:
    """Settings of transports between GPUs; see `Ring`."""

    min_ctas: int = 0
    max_ctas: int | None = None
    blocking: bool | None = None
    registered: bool | None = None
    delay_us: int = 0
    ce_mode: CeMode = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> TransportOptions:
        """Returns the options of a Ring's `transport_options`; the environment variable RTP_DEBUG_DELAY_US is the
        default delay."""
        given = dict(given or {})
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"Ring: expected transport_options among {', '.join(known)}, got {name!r}")
            if name in ("blocking", "registered"):
                if not isinstance(value, bool) and value is not None:
                    raise TypeError(f"Ring: expected transport option {name} to be a bool or None, got {value!r}")
            elif name == "ce_mode":
                check_choice("transport option ce_mode", value, get_args(CeMode))
            elif name == "max_ctas" and value is None:
                continue
            elif not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Ring: expected transport option {name} to be an int, got {value!r}")
            elif value < 0:
                raise ValueError(f"Ring: expected transport option {name} >= 0, got {value}")
        delay = os.environ.get("RTP_DEBUG_DELAY_US", "0")
        if not delay.isdecimal():
            raise ValueError(f"Ring: expected RTP_DEBUG_DELAY_US to be a number of microseconds, got {delay!r}")
        return cls(**{"delay_us": int(delay), **given})


class RingKeywords(TypedDict, total=False):
    """The keyword arguments of `Ring`, as a caller gives them. `RingOptions` has their defaults and meanings."""

    transport: Transport
    route: Route
    travel: Travel | None
    timeout: float | datetime.timedelta
    slot_cap: int
    prefetch: bool
    keep_recomputed: bool | None
    gradient_halves: bool | None
    late_gradients: int | None
    gradient_route: GradientRoute
    gradient_travel: GradientTravel | None
    buffers: Budget | int
    embedding: EmbeddingWay
    graphs: Graphs
    in_place: bool
    group: int | None
    collective: bool
    checksum: bool
    transport_options: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class RingOptions:
    """The options of a ring, in its own types. The ranks of a ring compare all fields.

    Raises ValueError for a value that no ring takes, and for two that cannot be combined on any ring.

    Attributes:
        transport: `shm` (CPU ranks of one host), `shm+tcp` and `shm+c10d` (the same inside hosts, the other between
            them), `tcp` (CPU ranks of any hosts), `c10d` (any torch.distributed backend), `ce` (copy engines, without
            SMs: GPUs of one host that all have direct access to each other, NCCL 2.29.2 or newer), `nccl` (direct
            NCCL), `ce+nccl` and `nccl+nccl` (on two levels), or `auto`: the first of `ce`, `ce+nccl`, `nccl+nccl`,
            `nccl`, or on CPUs of `shm`, `shm+tcp`, `tcp`, else `c10d`. `transport_reason` has the refused candidates.
        route: `ring` (every hop goes to the neighbour), `direct` (a shard comes directly from its owner), `gather`
            (operations that `group` applies to gather the whole weight first; others take the route that `auto`
            chooses), `two-level` (shards rotate inside each host while every rank passes one on to the next host; where
            the ranks are not spread evenly over hosts, the ring takes the route of `auto`, and `transport_reason` says
            why), or `auto`: two-level where possible, else the route planner decides for every linear layer and MLP.
        group: shards that are one operand of a product, from 1 to the number of ranks: a rank holds so many shards in
            each of two slots, in one if they are all. In linear layers cut along their outputs, MLPs, experts and
            fused vocabulary heads, but for frozen blocks; other operations, and linear layers and heads whose shards
            exceed `slot_cap`, are computed shard by shard. Not on route two-level, not in place, and not with travel.
            None: on GPUs the route planner chooses one shard, a quarter, half or all of them for every linear layer
            and MLP; elsewhere, and for other operations, one.
        gradient_route: `chain` (a partial sum of each gradient travels from rank to rank), `direct` (each contribution
            goes straight to its owner, who adds them up in float32; not on route two-level), or `auto`: direct where
            every rank reaches every other as cheaply as its neighbour and gradients travel in fewer than 32 bits, on
            GPUs also in more where `buffers` has room for R - 1 contributions.
        gradient_travel: `int8`: contributions travel in 8 bits, with a scale for each 128 numbers; on gradient route
            direct only. None: in the reduce dtype.
        buffers: what an operation may hold beyond slots of one shard. `auto`: the route planner gathers a linear layer,
            or computes with groups of its shards, where that is fastest by prediction (its weights and gradients are at
            most what `fully_shard` holds of its block); on gradient route direct every contribution arrives in a place
            of its own, R - 1 shards in all, and one addition reads and writes the gradient once; shards are sent ahead
            (see prefetch) up to the bytes that the largest pass receives, R - 1 shards but at least three, each counted
            as the largest slot. `lean`: nothing; layers rotate, contributions arrive and are added group by group in
            one slot, and one shard is ahead, in a slot that the layer before has left. A number: what takes more bytes
            is as with `lean`; shards are ahead in what groups and contributions leave.
        embedding: how ranks get the rows of an embedding. `rotate`: the table travels, and its gradient. `rows`: every
            rank sends its ids to the owners of the table, who answer with rows, and in backward the gradients of these
            rows, by collectives of torch.distributed. `auto`: rows in converted models where they save 1 MiB at least
            of what a rank sends for the largest number of tokens on any rank, as of the model's forwards 2, 4, 8, ...;
            elsewhere `rotate`. Rows are not rounded, so not with `travel`.
        timeout: seconds (or a timedelta); a neighbour that does not answer for so long is an error, RingTimeout.
        prefetch: whether shards of the next layers are sent while this one computes, in the order of use, within the
            look-ahead in bytes of `buffers`, and into a backward; the order is learned from the forward or backward
            before. Not in place. On route ring a shard that was passed on waits for its arrival, so that the look-ahead
            grows by one shard a layer.
        keep_recomputed: whether a forward that a backward computes again (activation checkpoints that are not
            reentrant) keeps its weights in slots until that backward takes them, which then receives none, as
            `fully_shard` keeps what it has gathered: at most the bytes of `buffers`; with `auto` twice the look-ahead,
            which a block fits in. Where all shards of a product are in one slot, or each in its own (group 1 or R),
            with prefetch. None: where hops cross a network or PCIe and `buffers` is not `lean`.
        gradient_halves: gradients of linear layers and bundles travel in two halves, each a chain of its own; None:
            on GPUs those of linear layers and MLPs where a gradient hop outlasts a dgrad. Not on route two-level.
        late_gradients: how many layers' gradients may still be arriving while a backward goes on to the layers before;
            each layer keeps its gradient slots until then. None: 2 where hops cross a network (a CPU ring over `tcp` or
            `c10d`); on GPUs 1, but for `buffers='lean'` and graphs; else 0. With tensor parallelism at most 1.
        travel: the dtype in which weights travel: None (the compute dtype), `bfloat16`, or `int8` (rounded to the
            nearest of 255 values in blocks of 128 numbers, each with a float32 scale: 1.03 bytes a number). The owner
            rounds once. Every rank, the owner included, dequantizes the weights before it computes, so that all
            compute with the same weights, in backward too. Not rounded are the local shard, which the optimizer
            updates, biases, `rotate`, `collect`, and a single rank. Not on route gather, and not in place.
        slot_cap: bytes; larger linear, embedding and vocabulary-head shards travel in chunks, one pass after the other,
            so that a vocabulary does not make every slot as large as itself. 0: no cap.
        graphs: runs passes of linear layers and MLPs as CUDA graphs, which take the host a few calls each: `auto`
            (where the transport supports them: `ce`, and emulated rings), `on` (elsewhere a ValueError), or `off`, the
            default until a graph has run on a GPU. A pass is captured once for its shapes, after it has run, and
            replayed where its tensors have the same addresses; otherwise it is enqueued hop by hop. With graphs
            nothing is sent ahead. See `graphs`.
        in_place: local shards themselves travel and return to their owners, with one slot instead of two. Where a cast
            copy travels anyway, and over shm, whose hops arrive in slots only, this saves nothing and copies travel.
            Not on route two-level, and not with travel.
        collective: where all shards are one operand (group=R, route gather, or chosen by the route planner), one
            all-gather brings the weights of an operation, and one reduce-scatter adds up its gradients and sends them
            home, in the reduce dtype and in an order that the collective chooses; gradients of other operations take
            the chain. Transports `nccl` and `c10d`, also between hosts; `auto` takes the first that works. A ring on
            which no operation can have such a group is a ValueError.
        checksum: every hop carries a CRC-32C; a changed one raises a RotationError that names the hop. For CPUs.
        transport_options: for GPUs. `min_ctas`, `max_ctas`: SMs that NCCL may take for each of two communicators
            (default of the maximum: 8; 0: NCCL chooses). `blocking`: no thread for each group of NCCL's calls (default:
            with NCCL >= 2.28.7, see docs/gpu.md). `registered`: slots registered with NCCL, which `nccl` moves without
            copies of its own (default: where that works). `delay_us`: delays hops at random, for race tests (default:
            RTP_DEBUG_DELAY_US). `ce_mode`: `push` by senders, `pull` by receivers, or `auto`: pull on route `direct`.
    """

    transport: Transport = "auto"
    route: Route = "auto"
    travel: Travel | None = None
    timeout: datetime.timedelta = 600.0  # type: ignore[assignment]
    slot_cap: int = SLOT_CAP
    prefetch: bool = True
    keep_recomputed: bool | None = None
    gradient_halves: bool | None = None
    late_gradients: int | None = None
    gradient_route: GradientRoute = "auto"
    gradient_travel: GradientTravel | None = None
    buffers: Budget | int = "auto"
    embedding: EmbeddingWay = "auto"
    graphs: Graphs = "off"
    in_place: bool = False
    group: int | None = None
    collective: bool = False
    checksum: bool = False
    transport_options: TransportOptions = None  # type: ignore[assignment]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> RingOptions:
        """Returns the options among `arguments`, by name; the others keep their defaults."""
        return cls(**{each.name: arguments[each.name] for each in fields(cls) if each.name in arguments})

    def __post_init__(self) -> None:
        if not isinstance(timeout := self.timeout, datetime.timedelta):
            try:
                object.__setattr__(self, "timeout", datetime.timedelta(seconds=timeout))
            except OverflowError as error:
                raise ValueError(f"Ring: expected a timeout below 1e14 seconds, got {timeout}") from error
        if not isinstance(given := self.transport_options, TransportOptions):
            object.__setattr__(self, "transport_options", TransportOptions.of(given))
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("route", self.route, ROUTES)
        if self.route == "two-level" and self.gradient_halves:
            raise ValueError("Ring: expected gradient_halves None or False with route two-level, got True")
        check_gradients("Ring", self.gradient_route, self.gradient_travel, self.route, self.gradient_halves)
        if self.timeout <= datetime.timedelta(0):
            raise ValueError(f"Ring: expected a positive timeout, got {self.timeout}")
        check_choice("graphs", self.graphs, get_args(Graphs))
        check_buffers(self.buffers)
        if self.slot_cap < 0:
            raise ValueError(f"Ring: expected slot_cap >= 0, got {self.slot_cap}")
        if self.prefetch not in (False, True):
            raise ValueError(f"Ring: expected prefetch True or False, got {self.prefetch!r}")
        object.__setattr__(self, "prefetch", bool(self.prefetch))
        if self.keep_recomputed and (not self.prefetch or self.buffers == "lean"):
            why = "prefetch=False" if not self.prefetch else "buffers='lean'"
            raise ValueError(f"Ring: expected keep_recomputed None or False with {why}, got {self.keep_recomputed!r}")
        late = self.late_gradients
        if late is not None and (isinstance(late, bool) or late < 0):
            raise ValueError(f"Ring: expected late_gradients >= 0 or None, got {late!r}")
        check_travel(self.travel, self.route)
        check_choice("embedding", self.embedding, get_args(EmbeddingWay))
        if self.embedding == "rows" and self.travel is not None:
            raise ValueError(
                f"Ring: expected embedding auto or rotate with travel={self.travel!r}, to which no row is rounded, got "
                "'rows'"
            )
        check_group(self.group, self.route, self.travel, self.in_place)
        if self.collective not in (False, True):
            raise ValueError(f"Ring: expected collective True or False, got {self.collective!r}")
        if self.collective:
            self._check_collective()
        if self.in_place:
            check_in_place("Ring", self.travel, self.route)

    def _check_collective(self) -> None:
        if self.transport != "auto" and not has_collectives(self.transport):
            raise ValueError(
                f"Ring: expected collective=False, or transport nccl or c10d, got True over {self.transport}, which "
                "sends from rank to rank only"
            )
        refused = {
            "route": "two-level",
            "gradient_route": "direct",
            "gradient_travel": "int8",
            "gradient_halves": True,
            "travel": self.travel,
            "in_place": True,
            "checksum": True,
        }
        for name, value in refused.items():
            if value is not None and getattr(self, name) == value:
                raise ValueError(f"Ring: expected collective=False with {name}={value!r}, got True")

    @property
    def look_ahead(self) -> int | None:
        """Bytes that may be sent ahead, beyond slots that are left; None: as `auto` of `buffers` says."""
        return {"auto": None, "lean": 0}[self.buffers] if isinstance(self.buffers, str) else self.buffers

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {getattr(self, each.name)}" for each in fields(self))


DEFAULTS = {each.name: each.default for each in fields(RingOptions)}  # as a caller gives them

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def takes(keywords: type, *records: type) -> Callable[[_Function], _Function]:
    """Gives a function with `**options: Unpack[keywords]` the signature that has each of them by name, with the default
    that it has in `records`, and the error of Python for others."""
    defaults = {each.name: each.default for record in records for each in fields(record)}
    given = {name: getattr(kind, "__forward_arg__", kind) for name, kind in keywords.__annotations__.items()}

    def give(function: _Function) -> _Function:
        before = inspect.signature(function)
        own = [each for each in before.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
            for name, kind in given.items()
        ]
        signature = before.replace(parameters=[*own, *named])

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            for name in options:
                if name not in signature.parameters:
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}")
            return function(*arguments, **options)

        call.__signature__ = signature  # type: ignore[attr-defined]
        kept = {name: kind for name, kind in function.__annotations__.items() if name in signature.parameters}
        call.__annotations__ = {**kept, **given, "return": before.return_annotation}
        return call  # type: ignore[return-value]

    return give


def describes(record: type) -> Callable[[_Class], _Class]:
    """Puts the attributes in a record's docstring in place of the line `**options: ...` of a class's."""

    def give(cls: _Class) -> _Class:
        attributes = str(record.__doc__).partition("    Attributes:\n")[2].rstrip()
        cls.__doc__ = re.sub(r" *\*\*options: .*", lambda _: attributes, str(cls.__doc__))
        return cls

    return give


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError where `value` is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"Ring: expected {what} to be one of {', '.join(choices)}, got {value!r}")


def check_buffers(buffers: str | int) -> None:
    """Raises ValueError unless `buffers` is 'auto', 'lean' or a number of bytes."""
    number = isinstance(buffers, int) and not isinstance(buffers, bool)
    if buffers not in get_args(Budget) and not (number and int(buffers) >= 0):
        raise ValueError(f"Ring: expected buffers 'auto', 'lean' or a number of bytes, got {buffers!r}")


def check_travel(travel: str | None, route: str) -> None:
    """Raises ValueError where the weights of a ring on this route cannot travel in this dtype."""
    if travel not in (None, *get_args(Travel)):
        raise ValueError(f"Ring: expected travel to be None, 'bfloat16' or 'int8', got {travel!r}")
    if travel is not None and route == "gather":
        raise ValueError(
            "Ring: expected travel None with route gather, whose products take all shards at once as they are "
            f"computed with, got {travel!r}; on every other route weights can travel so"
        )


def check_group(group: int | None, route: str, travel: str | None, in_place: bool) -> None:
    """Raises ValueError where no ring with these options computes with groups of so many shards."""
    if group is None:
        return
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise ValueError(f"Ring: expected group to be None or a number of shards from 1 to the ranks, got {group!r}")
    others = {"route": route, "travel": travel, "in_place": in_place or None}
    refused = {"route": ("gather", "two-level"), "travel": get_args(Travel), "in_place": (True,)}
    for name, value in others.items():
        if value in refused[name] and (group > 1 or value == "gather"):
            raise ValueError(f"Ring: expected group None with {name}={value!r}, got {group}")


def check_gradients(name: str, route: str, travel: str | None, hop_route: str, halves: bool | None = None) -> None:
    """Raises ValueError for a gradient route or travel that does not exist, or that no ring can combine with the other
    options. name: of the caller, for the errors."""
    if route not in get_args(GradientRoute):
        raise ValueError(f"{name}: expected gradient_route one of {', '.join(get_args(GradientRoute))}, got {route!r}")
    if travel not in (None, *get_args(GradientTravel)):
        raise ValueError(f"{name}: expected gradient_travel None or 'int8', got {travel!r}")
    if route == "chain" and travel is not None:
        raise ValueError(f"{name}: {PARTIAL_SUMS}, got gradient_travel {travel!r} with gradient_route 'chain'")
    if route == "direct" and hop_route == "two-level":
        raise ValueError(f"{name}: expected gradient_route auto or chain with route two-level, got 'direct'")
    if route == "direct" and halves:
        raise ValueError(f"{name}: expected gradient_halves None or False with gradient_route direct, got True")


def check_in_place(name: str, travel: str | None, route: str, group: int = 1) -> None:
    """Raises ValueError where local shards cannot travel themselves on a ring with these options."""
    if travel is not None:
        raise ValueError(
            f"{name}: expected in_place=False on a ring of travel={travel!r}, where copies travel, got True; "
            "a ring of travel=None moves shards in place"
        )
    if group > 1:
        raise ValueError(
            f"{name}: expected in_place=False on a ring of group={group}, whose slots hold copies, got True"
        )
    if route == "two-level":
        raise ValueError(
            f"{name}: expected in_place=False on route two-level, where a shard leaves in two directions at once, "
            "got True; a ring of route='ring' moves shards in place"
        )


def wire_itemsize(travel: str | None, dtype: Any) -> float:
    """Returns the bytes on the wire of one number of a weight of this compute dtype, with its share of the scales."""
    return travel_bytes(128, travel, dtype.itemsize) / 128
