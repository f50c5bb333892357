"""The cases of each operation for functional/test_operations.py.

Tolerances in bfloat16 count roundings, each of at most 2**-8. Sums are in float32, so an output or a gradient of a
linear layer depends on at most two. An output of an MLP depends on five (gate, up, activation, their product, the sum),
a gradient on seven (gate, up, and the gradients of the hidden value, times up, through the activation, times the
activated gate, the sum). For experts they are six (one more: the expert's output) and nine (times the router's weight,
and the rows). Logits and losses are float32: their gradients are rounded once, when autograd returns them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from grids import RINGS, pairs
from operation_checks import EXACT, FORMS, ROUNDING, Operation
from operations.bundles import ACTIVATIONS, BOTH, ROUTINGS, SETTINGS, make_experts, make_head, make_mlp
from operations.layers import CONVOLUTION_FORMS, CONVOLUTIONS, ID_FORMS, make_convolution, make_embedding, make_linear
from reference import TOLERANCE

FLOAT64, FLOAT32, BFLOAT16 = DTYPES = tuple(TOLERANCE)
Options = dict[str, Any]  # of `make`


def rounded(forward: float, backward: float) -> dict[torch.dtype, tuple[float, float]]:
    """Tolerances of outputs and gradients; of bfloat16, the given ones."""
    return {FLOAT64: (EXACT, EXACT), FLOAT32: (1e-5, 1e-5), BFLOAT16: (forward, backward)}


@dataclass(frozen=True)
class Described:
    """The cases of an operation.

    Attributes:
        grids: options that are tested in pairs, besides sizes, dtypes, in place and forms; one grid for each of the
            operations that share only a name.
        variants: each runs one pass, in float64 by default; `few` of them on the route direct, and in place.
        controls: cases whose wrong results the tolerances must reject.
        matters: pairs of options whose results differ.
        trained, frozen: cases of training and checkpointing, and of frozen parameters.
        mixed: cases computed in bfloat16 from parameters in float32.
        exact_sums: whether gradients of parameters are then sums of exact products.
        roundings: roundings of a gradient that is reduced in bfloat16, for the number of ranks.
    """

    make: Callable[..., Operation]
    tolerances: dict[torch.dtype, tuple[float, float]]
    sizes: list[Any]
    controls: list[Options]
    trained: list[Options]
    frozen: list[Options]
    mixed: list[Options]
    repeated: Callable[[int], list[Options]]  # options whose parameters so many ranks cut evenly
    grids: list[list[Options]] = field(default_factory=lambda: [[{}]])
    forms: list[str] = field(default_factory=lambda: FORMS)
    variants: list[Options] = field(default_factory=list)
    few: list[Options] = field(default_factory=list)
    matters: list[tuple[Options, Options]] = field(default_factory=list)
    rings: Any = tuple(RINGS)
    trained_in: tuple[torch.dtype, ...] = (FLOAT64, FLOAT32)
    autocasts: bool = True
    exact_sums: bool = False
    roundings: Callable[[int, Options], int] = lambda ranks, options: 2 * ranks


def recomputed(*options: Options) -> list[Options]:
    return [{**each, "recompute": recompute} for each in options for recompute in (False, True)]


LAYOUTS = [{"bias": bias, "transposed": transposed} for bias, transposed in product((True, False), repeat=2)]
IGNORED = [
    (settings, {key: value for key, value in settings.items() if key == "reduction"}) for settings in SETTINGS[1:]
]
MANY = {"tokens": 530}  # more than one chunk of a head
BIASED = {"biases": BOTH}
CLAMPED = {"activation": "clamped_swiglu", "transposed": True, "interleaved": True}

DESCRIBED = {
    "linear": Described(
        make_linear,
        rounded(2 * ROUNDING, 2 * ROUNDING),
        sizes=[(5, 7), (16, 17), (64, 1)],  # 64 -> 1 has fewer rows than ranks
        grids=[[{"dim": dim, **layout} for layout in LAYOUTS] for dim in (0, 1)],
        rings=((1, "c10d"), *product((2, 3, 4), ("shm", "c10d"))),
        controls=[{"size": (16, 17), "dim": dim} for dim in (0, 1)],
        trained=[{"dim": 0}, {"dim": 1, "size": (16, 17)}],
        trained_in=DTYPES,
        frozen=[{"dim": 0, "size": (16, 17)}, {"dim": 1, "size": (16, 17)}],
        mixed=[{"dim": 0, "size": (16, 17)}, {"dim": 1, "size": (16, 17)}],
        exact_sums=True,
        repeated=lambda ranks: [{"size": (6 * ranks, 4 * ranks), "dim": dim} for dim in (0, 1)],
    ),
    "embedding": Described(
        make_embedding,
        {dtype: (0.0, tolerance) for dtype, tolerance in TOLERANCE.items()},  # rows are copied, never summed
        sizes=[(5, 7), (1, 6), (50, 3)],  # fewer rows than ranks, fewer columns
        grids=[[{"dim": dim, "padding": padding} for padding in (None, 0, -1)] for dim in (0, 1)],
        forms=ID_FORMS,
        controls=[{"size": (16, 17), "every": True, "padding": 3, "dim": dim} for dim in (0, 1)],
        matters=[({"size": (16, 17), "every": True, "padding": 3}, {"size": (16, 17), "every": True})],
        trained=[{"dim": 0}, {"dim": 1, "size": (50, 3)}],
        trained_in=DTYPES,
        frozen=[{"dim": 0}, {"dim": 1}],
        mixed=[{"size": (16, 17), "dim": dim} for dim in (0, 1)],
        autocasts=False,
        repeated=lambda ranks: [{"size": (4 * ranks, 6 * ranks), "dim": dim} for dim in (0, 1)],
    ),
    "convolution": Described(
        make_convolution,
        rounded(2 * ROUNDING, 2 * ROUNDING),
        sizes=list(CONVOLUTIONS),
        forms=CONVOLUTION_FORMS,
        controls=[{"shape": "2d", "times": 2}, {"shape": "2d, 3 groups", "times": 2}],  # every rank has rows
        trained=[{"shape": "1d"}, {"shape": "2d, 3 groups"}],
        trained_in=DTYPES,
        frozen=[{"shape": "2d, 3 groups"}],
        mixed=[{"shape": "2d, 3 groups"}],
        repeated=lambda ranks: [{"shape": "1d", "times": ranks}],
    ),
    "mlp": Described(
        make_mlp,
        rounded(5 * ROUNDING, 7 * ROUNDING),
        sizes=[(5, 7, 6), (16, 17, 9), (6, 3, 2)],  # the last has fewer of some than ranks
        grids=[[{"activation": "gelu"}, {"activation": "swiglu"}]],
        variants=[
            {"activation": activation, "recompute": recompute, "bias": cut, "transposed": cut}
            for activation, recompute, cut in product(ACTIVATIONS, (False, True), (False, True))
        ],
        few=[
            {"activation": activation, "recompute": recompute, "bias": cut, "transposed": cut}
            for activation, recompute, cut in product(("gelu", "swiglu"), (False, True), (False, True))
        ],
        controls=[{"size": (16, 17, 9), "activation": each, "bias": False} for each in ("gelu", "swiglu")],
        trained=recomputed({}),
        frozen=recomputed({"bias": False}, {"activation": "relu"}),
        mixed=recomputed({"size": (16, 17, 9)}, {"size": (16, 17, 9), "activation": "gelu"}),
        repeated=lambda ranks: [{"size": (5, 4 * ranks, 6 * ranks), "bias": bias} for bias in (False, True)],
    ),
    "experts": Described(
        make_experts,
        rounded(6 * ROUNDING, 9 * ROUNDING),
        sizes=[(5, 6, 4), (3, 5, 1), (8, 16, 12)],  # the second has fewer experts than ranks
        grids=[[{"activation": "gelu"}, {}, BIASED, BIASED | CLAMPED]],
        variants=[
            *recomputed(*({"activation": activation} for activation in ACTIVATIONS)),
            {"dtype": BFLOAT16, "weights_dtype": FLOAT32},  # of a router that stays in float32
            *(
                {"routing": routing, "choices": choices, "size": size, "biases": biases}
                for routing, choices, size, biases in pairs(ROUTINGS, (1, 2, 3), ((5, 6, 4), (3, 5, 1)), ((), BOTH))
            ),
            *(
                {"biases": biases, "activation": activation, "recompute": recompute}
                for biases, activation, recompute in pairs(
                    (BOTH, BOTH[:1], BOTH[1:]), ("gelu", "swiglu", "clamped_swiglu"), (False, True)
                )
            ),
            *(
                {"transposed": transposed, **kind, "biases": biases, "recompute": recompute}
                for transposed, kind, biases, recompute in pairs(
                    (False, True),
                    (
                        {"activation": "gelu"},
                        *(
                            {"activation": activation, "interleaved": interleaved}
                            for activation, interleaved in product(("reglu", "clamped_swiglu"), (False, True))
                        ),
                    ),
                    (BOTH, ()),
                    (False, True),
                )
            ),
        ],
        few=[
            *recomputed({"activation": "gelu"}, {"activation": "swiglu"}),
            *(
                {"routing": routing, "size": size, "biases": biases}
                for routing, size, biases in pairs(ROUTINGS, ((5, 6, 4), (3, 5, 1)), ((), BOTH))
            ),
            *recomputed(BIASED, BIASED | CLAMPED),
        ],
        controls=[
            {"size": (4, 16, 12), "choices": 3, "activation": activation, "biases": biases}
            for activation, biases in (("gelu", ()), ("swiglu", BOTH))
        ],
        trained=recomputed({"size": (3, 6, 4), **BIASED}),
        frozen=[*recomputed({}), {**BIASED, "recompute": True}],
        mixed=recomputed({"size": (4, 16, 12)}, {"size": (4, 16, 12), "activation": "gelu"}),
        repeated=lambda ranks: [
            {"size": (2 * ranks, 6, 5), "routing": "distinct", "biases": each} for each in ((), BOTH)
        ],
    ),
    "linear_cross_entropy": Described(
        make_head,
        rounded(1e-5, ROUNDING),
        sizes=[(11, 5), (3, 6), (17, 16)],  # vocabulary, features; the second has fewer rows than ranks
        grids=[[{"settings": {"reduction": "none"}}, {"settings": {"reduction": "sum"}}]],
        variants=[
            {"settings": settings, "bias": variant, "transposed": variant != bool(tokens), **tokens}
            for settings, variant, tokens in product(SETTINGS, (False, True), ({}, MANY))
        ]
        + [
            {"dtype": dtype, "settings": settings, "size": (17, 16), **tokens}
            for dtype, settings, tokens in product((FLOAT32, BFLOAT16), (SETTINGS[0], SETTINGS[-1]), ({}, MANY))
        ],
        few=[
            *({"settings": settings, "transposed": True} for settings in SETTINGS),
            {"settings": SETTINGS[-1], "bias": False, **MANY},
        ],
        controls=[{"size": (17, 16), "settings": {"reduction": "none"}, **tokens} for tokens in ({}, MANY)],
        matters=[({"settings": settings}, {"settings": kept}) for settings, kept in IGNORED],
        trained=[{"settings": SETTINGS[0]}, {"settings": SETTINGS[-1]}],
        frozen=[
            {"settings": settings, **more}
            for settings, more in product((SETTINGS[0], SETTINGS[-1]), ({}, {**MANY, "bias": False}))
        ],
        mixed=[
            {"size": (17, 16), "settings": settings, **tokens}
            for settings, tokens in product((SETTINGS[0], SETTINGS[-1]), ({}, MANY))
        ],
        exact_sums=True,
        # every rank rounds the product of each of its chunks, and each sum
        roundings=lambda ranks, options: 2 * ranks * (5 if "tokens" in options else 1),
        repeated=lambda ranks: [{"size": (4 * ranks, 5)}],
    ),
}
