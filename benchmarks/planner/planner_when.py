"""Generates the comparison of rotation with other plans in docs/predictions.md, with all other settings equal."""

import dataclasses
import functools

from shared.table import markdown, wrapped

from planner.planner_runs import title
from rtp_ext.gpu_rates import WIRES
from rtp_ext.planner import Cluster, ModelSpec, Strategy, estimate_memory, estimate_time
from rtp_ext.planner.constants import constants
from rtp_ext.planner.plans.differences import differences
from rtp_ext.planner.plans.forwards import forwards_table
from rtp_ext.planner.plans.when import Cell, grid, when_table

GB = 1e9
_ALIKE = ((False, "none"), (True, "none"), (True, "selective"), (True, "full"))  # fused loss, recomputation
_HEADS = ("loss head", "recomputed", "`rtp=8`", "`zero=3`", "`rtp=8`", "`zero=3`", "memory, rtp / zero", "time")


@functools.cache
def cells() -> list[Cell]:
    return grid()


def when() -> str:
    return f"\n{when_table(cells())}\n\n"


def forwards() -> str:
    return f"\n{forwards_table()}\n\n"


def _tie() -> float:
    return 1 + float(constants()["search"]["tie_fraction"]["value"])


def like() -> str:
    """Compares rotation with fully_shard at equal settings, and counts the cells of `--when` that rotation wins."""
    model, cluster = ModelSpec.preset("llama-3-8b", seq=8192), Cluster.preset("h100-80gb", gpus=8)

    def told(plan: Strategy) -> tuple[float, str, float]:
        memory = estimate_memory(model, cluster, plan, cluster.gpus)
        return (
            memory.peak_allocated_bytes / GB,
            memory.verdict,
            estimate_time(model, cluster, plan, cluster.gpus).step_seconds,
        )

    rows, found = [], {}
    for fused, recompute in _ALIKE:
        shared = {"fused_loss": fused, "recompute": recompute}
        plans = [Strategy(rtp=8, **shared), Strategy(dp=8, zero=3, **shared)]
        if unlike := differences(plans):
            raise ValueError(f"expected plans that differ in their layout only, got differences in {unlike}")
        ours, theirs = found[fused, recompute] = [told(plan) for plan in plans]
        sizes = [f"{size:.1f} GB, {verdict}" for size, verdict, _ in (ours, theirs)]
        times = [f"{seconds:.3f} s" for *_, seconds in (ours, theirs)]
        ratios = (f"{ours[0] / theirs[0]:.2f}", f"{ours[-1] / theirs[-1]:.2f}")
        rows.append((plans[0].effective_loss, recompute, *sizes, *times, *ratios))
    ours, theirs = found[True, "none"]
    unbundled, *_ = told(Strategy(rtp=8, fused_loss=True, bundle=False))
    won = sum(cell.advantage > _tie() for cell in cells())
    tied = sum(cell.winner == "tie" for cell in cells())
    first = (
        "**In these predictions rotation saves memory, and seldom time.** Llama 3 8B on 8 H100 of 80 GB, one sample of "
        "8192 tokens for each. The table compares a ring with `fully_shard` at the same loss head, recomputation, "
        "dtypes and kernels:"
    )
    last = (
        f"With the fused loss on both, the ring takes {ours[0]:.1f} GB against {theirs[0]:.1f} and is "
        f"{100 * (ours[-1] / theirs[-1] - 1):.0f} % slower. Most of the difference is two of the four hidden tensors "
        "of each SwiGLU, which bundles do not keep; a fused SwiGLU under `fully_shard` would not keep them either. "
        f"Without bundles (`bundle=no`) the ring takes {unbundled:.1f} GB. Rotation is the fastest in {won} of the "
        f"{len(cells())} cells of `--when` ([below](#when-rotation-wins)), and ties in {tied}."
    )
    return f"\n{wrapped(first)}\n{markdown(_HEADS, rows)}{wrapped(last)}\n\n"


def claims_of_when() -> list[str]:
    tie = constants()["search"]["tie_fraction"]["value"]
    known = {(cell.model, cell.link, cell.tokens): cell for cell in cells()}
    node = [cell for cell in cells() if cell.gpus == 8 and cell.link == "NVLink" and cell.tokens >= 4096]
    near = [cell.advantage for cell in node]
    long = known["llama-3-8b", "NVLink", 8192].plans
    rtp, fsdp = long["rtp"], long["fsdp"]
    won = [cell for cell in cells() if cell.advantage > 1 + tie]
    ties = [cell for cell in cells() if cell.winner == "tie" and cell.link == "PCIe" and cell.tokens == 8192]
    assert rtp and fsdp and won and {cell.link for cell in won} == {"PCIe"}, [dataclasses.astuple(cell) for cell in won]
    return [
        f"differences within {100 * tie:.0f} % count as ties",
        f"a tie, or nearly, with `fully_shard` and the hybrids ({min(near):.2f} to {max(near):.2f})",
        f"Llama 3 8B at 8k tokens, {rtp.step_seconds:.2f} s against {fsdp.step_seconds:.2f} s of `fully_shard`",
        f"PCIe ({WIRES['pcie'] / GB:.0f} GB/s)",
        f"RTP wins {len(won)} of the {len(cells())} cells by more than the model's error",
        *(
            f"{_title(cell)}{' in rings under a pipeline' * (cell.winner == 'rtp hybrid')}, {cell.tokens // 1024}k "
            f"tokens: {cell.advantage:.2f}"
            for cell in won
        ),
        f"{' and '.join(_title(cell).removeprefix('Llama 3 ') for cell in reversed(ties))} "
        f"{'tie' if len(ties) > 1 else 'ties'} at 8k",
    ]


def _title(cell: Cell) -> str:
    return title(cell.model)
