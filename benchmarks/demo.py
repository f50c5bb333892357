"""The main job in a few minutes on two CPU cores: the same training run rotated over two ranks and in one process.

    make demo

Trains the default model of train_lm.py with RTP on two local ranks and once more in a single process on the same
batches, then takes a few steps with `fully_shard` and DDP for their memory and speed. Prints one table, draws
demo-output/demo.png, and fails when the two loss curves differ by more than 1e-4 at any step.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
TOLERANCE = 1e-4
RANKS = 2
MIB = 2**20

Result = dict[str, Any]


def train(strategy: str, steps: int, args: argparse.Namespace, ranks: int = RANKS) -> Result:
    """Runs train_lm.py and returns its result. Its progress line goes to this terminal."""
    options = {
        "strategy": strategy,
        "ranks": ranks,
        "steps": steps,
        "batch": args.batch,
        "seq": args.seq,
        "device": "cpu",
    }
    command = [sys.executable, str(HERE / "train_lm.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"training with strategy {strategy} failed (exit code {done.returncode})")
    return json.loads(done.stdout.splitlines()[-1])


def buffer_bytes(result: Result, plain: Result) -> int:
    """Returns the bytes that forward and backward hold beyond those of the plain model on the same local batch."""
    key = "transient_forward_backward_bytes"
    return max(0, result[key] - plain[key])


def print_table(runs: dict[str, Result], single: Result, plain: Result, difference: float) -> None:
    rtp = runs["rtp"]
    print(f"\n{rtp['shape']}; {rtp['tokens']} tokens per rank and step; {rtp['ranks']} ranks on {rtp['device']}\n")
    print(f"{'':<34}{'rtp':>12}{'single':>12}{'fsdp2':>12}{'ddp':>12}")
    columns = [rtp, single, runs["fsdp2"], runs["ddp"]]

    def row(label: str, cells: list[str]) -> None:
        print(f"{label:<34}" + "".join(f"{cell:>12}" for cell in cells))

    steps = rtp["steps"]
    row(f"loss after {steps} steps (nats per byte)", [f"{run['losses'][-1]:.6f}" for run in (rtp, single)])
    row("largest difference at any step", [f"{difference:.1e}"])
    print("memory per rank, bytes")
    names = {"parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer state": "optimizer_bytes"}
    for label, key in {**names, "peak transient": "transient_bytes"}.items():
        row(f"  {label}", [f"{run[key]:,}" for run in columns])
    row("    beyond the plain model", ["-" if run is single else f"{buffer_bytes(run, plain):,}" for run in columns])
    row("    of it ring slots", [f"{rtp['slot_bytes']:,}"])
    row("tokens per second, all ranks", [f"{run['tokens_per_s']:,.0f}" for run in columns])
    print("\nPeak transient: most bytes alive during a step beyond the three lines above it: activations and buffers.")
    print("Beyond the plain model: what forward and backward hold more than one process does on one local batch.")
    print(
        f"`single` trains in one process on the batches of both ranks. fsdp2 and ddp ran {runs['ddp']['steps']} steps."
    )


def draw(runs: dict[str, Result], single: Result, plain: Result, differences: list[float], path: Path) -> None:
    """Loss curves and their difference on the left, what one rank holds on the right. Legible in black and white."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(11, 5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.1, 1), height_ratios=(2.4, 1))
    curves = figure.add_subplot(grid[0, 0])
    gap = figure.add_subplot(grid[1, 0], sharex=curves)
    draw_losses(curves, gap, runs["rtp"], single, differences)
    draw_memory(figure.add_subplot(grid[:, 1]), runs, plain)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def draw_losses(curves: plt.Axes, gap: plt.Axes, rtp: Result, single: Result, differences: list[float]) -> None:
    steps = range(1, len(differences) + 1)
    curves.plot(steps, single["losses"], color="0.72", linewidth=5, solid_capstyle="round", label="one process")
    curves.plot(steps, rtp["losses"], color="black", linewidth=1.2, label=f"RTP on {rtp['ranks']} ranks")
    curves.set_ylabel("loss (nats per byte)")
    curves.set_title("Same batches, same losses", loc="left", fontweight="bold")
    curves.tick_params(labelbottom=False)
    curves.legend(frameon=False)
    gap.axhline(TOLERANCE, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    gap.annotate("tolerance", (1, TOLERANCE), (0, 3), textcoords="offset points", fontsize=8)
    # a difference of zero has no place on a logarithmic axis
    floor = 1e-9
    gap.plot(steps, [max(value, floor) for value in differences], "o", color="black", markersize=2.5)
    gap.set_yscale("log")
    gap.set_ylim(floor / 2, TOLERANCE * 20)
    gap.set_yticks([floor, 1e-7, 1e-5, 1e-3], ["0", *(rf"$10^{{{power}}}$" for power in (-7, -5, -3))])
    gap.minorticks_off()
    gap.set_ylabel("|difference|")
    gap.set_xlabel("step")


def draw_memory(axes: plt.Axes, runs: dict[str, Result], plain: Result) -> None:
    titles = {"rtp": "RTP", "fsdp2": "fully_shard", "ddp": "DDP"}
    styles = {
        "parameters": {"color": "0.15"},
        "gradients": {"color": "0.45"},
        "optimizer state": {"color": "0.70"},
        "activations, temporaries": {"color": "white", "hatch": "...."},
        "unsharded weights, buffers": {"color": "white", "hatch": "//////"},
    }
    for place, strategy in enumerate(titles):
        run = runs[strategy]
        transit = min(buffer_bytes(run, plain), run["transient_bytes"])
        kept = [run["parameter_bytes"], run["gradient_bytes"], run["optimizer_bytes"]]
        bottom = 0.0
        for size, (label, style) in zip(
            [*kept, run["transient_bytes"] - transit, transit], styles.items(), strict=True
        ):
            options = {**style, "edgecolor": "black", "linewidth": 0.8, "width": 0.6}
            axes.bar(place, size / MIB, bottom=bottom, label=label if place == 0 else None, **options)
            bottom += size / MIB
        axes.annotate(f"{bottom:.0f}", (place, bottom), (0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(titles)), titles.values())
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("peak memory per rank (MiB)")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.02)
    axes.set_title("What one rank holds", loc="left", fontweight="bold")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="upper left", handlelength=1.6, handleheight=1.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train with RTP and in one process, and compare. See the top of the file."
    )
    parser.add_argument("--steps", type=int, default=60, help="steps of the two long runs")
    parser.add_argument("--short-steps", type=int, default=10, help="steps of fully_shard and DDP")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per window")
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo-output", help="folder of demo.png")
    args = parser.parse_args()

    runs = {"rtp": train("rtp", args.steps, args)}
    single = train("single", args.steps, args)
    runs.update({strategy: train(strategy, args.short_steps, args) for strategy in ("fsdp2", "ddp")})
    plain = train("single", 3, args, ranks=1)

    differences = [abs(a - b) for a, b in zip(runs["rtp"]["losses"], single["losses"], strict=True)]
    print_table(runs, single, plain, max(differences))
    args.output.mkdir(parents=True, exist_ok=True)
    draw(runs, single, plain, differences, args.output / "demo.png")
    print(f"\nDrawn: {args.output / 'demo.png'}")
    if not max(differences) <= TOLERANCE:
        sys.exit(f"the losses differ by {max(differences):.2e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
