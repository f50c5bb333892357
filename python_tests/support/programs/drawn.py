"""Draws a random program from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from programs import workers
from rtp_ext.outer import (
    AllReduce,
    Compressor,
    DiLoCo,
    Gossip,
    LocalSGD,
    OuterPolicy,
    PowerSGD,
    Quantize,
    TopK,
    ZeroOuter,
)
from rtp_ext.outer.local_training.diloco import nesterov

CHECKPOINTED = (None, None, True, False)
ACTIONS = ("step", "step", "step", "accumulate", "clip", "evaluate", "forward", "freeze", "reload", "nap")
WIDE_ACTIONS = (*ACTIONS, "step", "step", "unreduced", "average", "twin", "swap")
SWAPS = ("exchanged", "plain", "rotated", "gone", "shared")  # see run.py
MESHES = {2: ((1, 2), (2, 1)), 3: ((1, 3), (3, 1)), 4: ((2, 2), (2, 2), (4, 1), (1, 4)), 6: ((2, 3), (3, 2))}
BACKENDS = (*[None] * 6, "eager", "eager", "aot_eager", "aot_eager", "inductor")
TWINS = (None, "averaged", "averaged one by one", "by hand", "by hand, foreach")
STEPS = ("for loop", "foreach")  # how the optimizer is written; DTensor has no fused SGD

COMPRESSORS = {"top-k": lambda: TopK(0.3), "quantized": lambda: Quantize(4, 16), "low rank": lambda: PowerSGD(1)}
# A policy, and its rule between plain workers; None: there is one worker, which takes the mean gradient of all ranks.
POLICIES = {
    "all-reduce": (AllReduce, None),
    "zero": (ZeroOuter, None),
    **{name: (lambda make=make: AllReduce(make()), None) for name, make in COMPRESSORS.items()},
    "local SGD": (lambda: LocalSGD(2, warmup=1), workers.local_sgd(2, 1)),
    "DiLoCo": (lambda: DiLoCo(2), workers.diloco(2, nesterov)),
    "delayed DiLoCo": (lambda: DiLoCo(3, delay=1, keep=0.25), workers.diloco(3, nesterov, None, 1, 0.25)),
    "gossip": (lambda: Gossip("ring"), workers.gossip("ring")),
    "gossip beside": (lambda: Gossip("ring", overlap=True), workers.gossip_beside("ring")),
}


@dataclass
class Program:
    """All draws from a seed."""

    seed: int
    ranks: int
    dtype: torch.dtype
    width: int
    vocabulary: int
    blocks: list[tuple[str, int, bool | None]]  # kind, hidden size, how it is checkpointed
    tied: bool
    frozen: set[int]  # of the parameters, by number
    replicas: int
    options: list[dict[str, Any]]  # of the rings, one after the other
    actions: list[str] = field(default_factory=list)
    policy: str = "all-reduce"  # of POLICIES
    backend: str | None = None  # of torch.compile; None: it is not called
    twin: str | None = None  # a moving average of the weights, and how it is kept
    steps: str = "for loop"

    @classmethod
    def draw(cls, seed: int, ranks: int, brief: bool = False, wide: bool = False) -> Program:
        draw = random.Random(seed * 1009 + ranks)
        kinds = ("mlp", "linear", "attention", "convolution", "norm", "experts")
        blocks = [
            (draw.choice(kinds), draw.choice((3, 8)) if brief else draw.randint(1, 13), draw.choice(CHECKPOINTED))
            for _ in range(1 if brief else draw.randint(1, 3))
        ]
        actions = [draw.choice(WIDE_ACTIONS if wide else ACTIONS) for _ in range(2 if brief else draw.randint(4, 7))]
        program = cls(
            seed=seed,
            ranks=ranks,
            dtype=draw.choice((torch.float64, torch.float64, torch.float32)),
            width=draw.choice((4, 6)) if brief else 2 * draw.randint(1, 6),
            vocabulary=7 if brief else draw.randint(2, 17),
            blocks=blocks,
            tied=draw.random() < 0.4,
            frozen={n for n in range(12) if draw.random() < 0.15},
            replicas=draw.choice((1, 2)) if ranks % 2 == 0 else 1,
            options=[cls.ring_options(draw) for _ in range(1 + actions.count("reload"))],
            actions=actions,
        )
        if wide:
            program.widen(draw)
        elif ranks == 2:
            program.replicas = 1
        draw = random.Random(f"{seed} {ranks}")  # of its own: what is drawn above stays
        for options in program.options:
            options |= program.look_ahead(draw, options)
        if not brief and program.dtype == torch.float64 and draw.random() < 0.2:
            program.actions += ["turns", "step"]
        return program

    @staticmethod
    def ring_options(draw: random.Random) -> dict[str, Any]:
        return {
            "transport": draw.choice(("shm", "tcp", "c10d")),
            "route": draw.choice(("auto", "ring", "direct", "gather")),
            "prefetch": draw.choice((0, 1)),
            "gradient_halves": draw.choice((None, False, True)),
            "late_gradients": draw.choice((None, 0, 2)),
            "slot_cap": draw.choice((0, 100, 1 << 20)),
            "checksum": draw.random() < 0.3,
            "in_place": draw.random() < 0.3,
            "bundle": draw.choice((True, False, "recompute")),
        }

    def look_ahead(self, draw: random.Random, options: dict[str, Any]) -> dict[str, Any]:
        """Draws how many shards are one operand, how they arrive, and which weights are kept, as `options` permit."""
        kept = options["prefetch"] and not options["in_place"] and options.get("buffers") != "lean"
        drawn = {
            "keep_recomputed": draw.choice((None, False, True)) if kept else None,
            "embedding": draw.choice(("auto", "rotate", "rows")),
            "group": draw.choice((None, 1, self.ring)) if options["route"] != "gather" else None,
        }
        if options["in_place"]:
            drawn["group"] = None
        whole = options["route"] == "gather" or drawn["group"] == self.ring
        direct = options.get("gradient_route") == "direct" or options["gradient_halves"]
        if self.ring > 1 and whole and not direct and not (options["in_place"] or options["checksum"]):
            drawn["collective"] = draw.choice((False, True))
            if drawn["collective"]:
                drawn["transport"] = "c10d"
        return drawn

    def widen(self, draw: random.Random) -> None:
        """Draws the further parts of wide programs."""
        self.replicas = draw.choice(MESHES[self.ranks])[0]
        self.policy = draw.choice(list(POLICIES)) if self.replicas > 1 else "all-reduce"
        self.backend = draw.choice(BACKENDS)
        self.twin, self.steps = draw.choice(TWINS), draw.choice(STEPS)
        if self.policy in COMPRESSORS:  # in float32 one more rounding may choose another value
            self.dtype = torch.float64
            # A backward within the backward ends a reduction where no gradient has come before it: what is left of it
            # is compressed on its own.
            self.blocks = [(kind, hidden, how and None) for kind, hidden, how in self.blocks]
        for options in self.options:
            options["gradient_route"] = draw.choice(("auto", "chain", "direct"))
            options["offload"] = self.policy != "zero" and draw.random() < 0.25
            if options["offload"] or self.policy == "zero":
                options["in_place"] = False
            if options["gradient_halves"]:
                options["gradient_route"] = "chain"
        for options in self.options:
            if options["prefetch"]:
                options["buffers"] = draw.choice(("auto", "lean", 1000))

    @property
    def ring(self) -> int:
        return self.ranks // self.replicas

    @property
    def outer(self) -> OuterPolicy:
        return POLICIES[self.policy][0]()

    @property
    def compressor(self) -> Compressor | None:
        """Returns a compressor like that of the policy."""
        return COMPRESSORS[self.policy]() if self.policy in COMPRESSORS else None

    @property
    def rule(self) -> workers.Rule | None:
        """The rule between replicas in local training; None without local training."""
        return POLICIES[self.policy][1]
