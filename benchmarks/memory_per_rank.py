"""Bytes that one rank of R holds while it trains a Llama: rotated, fully sharded, replicated, tensor parallel.

    python benchmarks/memory_per_rank.py                                 # Llama-3-8B at R = 8, on a GPU
    python benchmarks/memory_per_rank.py --model tiny --ranks 4 --tokens 256

One process stands for one rank. Rotation runs on the emulated ring, where only this rank's shards exist; the other
strategies run on torch's fake process group, whose collectives move no data: their numerical results are meaningless,
but they allocate the same memory as a real rank. Neither includes the buffers of a communication library.

Every rank has its own batch of `--tokens` tokens. Tensor parallelism has one batch for all ranks, so its rank computes
with all R batches (`computed_tokens`). Each strategy runs in its own process, takes three AdamW steps, and reports the
third; parameters are float32 with bfloat16 compute, unless --parameter-dtype is given. If a strategy does not fit with
all layers, it is run with half as many, and the line contains the number of layers.

peak_bytes and reserved_bytes are the maxima that torch's allocator handed out and reserved on the GPU. On a CPU
(measured as in memory.py) reserved_bytes is unknown. One JSON line for each strategy is appended to
results/<machine>/memory_per_rank.jsonl; the last line of stdout is JSON.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.memory import PROBED_STEPS, MemoryProbe
from shared.models import Llama, random_tokens
from shared.strategies import DTYPES, STRATEGIES, Trainer
from shared.table import Columns, console, mebibytes, told
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import rtp_ext

TENSOR_PARALLEL = "tp"
OURS = ("rtp-unbundled", "rtp", "rtp-recompute", "rtp-fused", "rtp-inplace")
OTHERS = ("fsdp2", "ddp", TENSOR_PARALLEL)
DOES_NOT_FIT = 3  # exit status of a process that ran out of memory


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int


SIZES = {
    "llama3-8b": Size(32, 4096, 32, 8, 14336, 128256),
    "small": Size(4, 512, 8, 8, 1408, 16384),
    "tiny": Size(2, 128, 8, 8, 256, 512),
}


def build(strategy: str, size: Size, layers: int, args: argparse.Namespace, device: torch.device) -> Trainer:
    """Returns a trainer whose model has only the parts on this rank that the strategy keeps."""
    parameters, compute = DTYPES[args.parameter_dtype], DTYPES[args.dtype]
    with torch.device("meta"):
        model = Llama(**{**asdict(size), "layers": layers}).to(parameters)
    if args.checkpoint:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy, autocast = None, None
    if parameters != compute:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        if not STRATEGIES[strategy].follows_policy:
            policy, autocast = None, compute
    if strategy.startswith("rtp"):
        where: Any = rtp_ext.Ring.emulated(args.ranks, device=device)
    else:
        where = fake_mesh(args.ranks, device)
    if strategy == "ddp":
        model = STRATEGIES[strategy].convert(fill(model, device), where, policy)
        model.register_comm_hook(None, leave_bucket)
    elif strategy == TENSOR_PARALLEL:
        fill(STRATEGIES[strategy].convert(model, where, policy), device)
    else:
        model = STRATEGIES[strategy].convert(model, where, policy)
        fill(model, device)
    model.train()
    return Trainer.around(strategy, model, device, lr=1e-4, autocast=autocast)


def fake_mesh(ranks: int, device: torch.device) -> DeviceMesh:
    """Returns a mesh of `ranks` in which only rank 0 exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return init_device_mesh(device.type, (ranks,))


def leave_bucket(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replaces DDP's all-reduce, since the fake process group returns no result for it."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def fill(model: nn.Module, device: torch.device) -> nn.Module:
    """Gives a model of the meta device memory and small random weights."""
    model.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.is_floating_point():
                local.normal_(std=0.02) if local.dim() > 1 else local.fill_(1.0)
    return model


def measure(strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """One strategy with `args.layers` layers, in this process."""
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    size = SIZES[args.model]
    computed = args.tokens * (args.ranks if STRATEGIES[strategy].whole_batch else 1)
    generator = torch.Generator().manual_seed(0)
    batch = random_tokens(computed, generator, seq=min(args.seq, args.tokens), vocabulary=size.vocabulary)
    inputs, targets = (part.to(device) for part in batch)
    with MemoryProbe(device) as probe:
        trainer = build(strategy, size, args.layers, args, device)
        for _ in range(PROBED_STEPS):
            probe.step(trainer, inputs, targets)
        memory = probe.memory(trainer)
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    trainer.close()
    return result_line(
        environment_card(device, args.command),
        benchmark="memory_per_rank",
        case=f"{args.model}/{strategy}/R{args.ranks}/L{args.layers}",
        strategy=strategy,
        shape=f"Llama, {args.layers} layers, hidden {size.hidden}, inner {size.inner}, vocabulary {size.vocabulary}",
        tokens=args.tokens,
        ranks=args.ranks,
        direction="step",
        transport=None if trainer.ring is None else trainer.ring.transport,
        dtype=args.dtype,
        **memory.row(),
        reserved_bytes=reserved,
        layers=args.layers,
        full_layers=size.layers,
        computed_tokens=computed,
        parameter_dtype=args.parameter_dtype,
        checkpoint=args.checkpoint,
    )


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Also where a library says so in its own words."""
    texts = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts)


class Failed(RuntimeError):
    """A strategy that failed for another reason than memory."""


def in_a_process_of_its_own(strategy: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """The line of a strategy with as many layers as fit; None where not even one does. Raises Failed."""
    layers = args.layers
    while layers > 0:
        options = ["--one", strategy, "--layers", str(layers), "--as-typed", args.command]
        for name in ("model", "ranks", "tokens", "seq", "dtype", "parameter_dtype", "device"):
            options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        options += ["--checkpoint"] if args.checkpoint else []
        done = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout.strip().splitlines()[-1])
        if done.returncode != DOES_NOT_FIT:
            raise Failed(f"{strategy} with {layers} layers failed with status {done.returncode}: {done.stdout}")
        print(f"{strategy} does not fit with {layers} layers", flush=True)
        layers //= 2
    return None


SIZES_OF = ("parameter", "gradient", "optimizer", "transient", "slot", "peak", "reserved")
COLUMNS: Columns = {
    "MiB per rank": told("strategy"),
    "layers": told("layers"),
    **{name: mebibytes(f"{name}_bytes") for name in SIZES_OF},
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory of one rank. See the top of the file.")
    add = parser.add_argument
    add("--model", choices=SIZES, default="llama3-8b")
    add("--strategies", type=lambda text: text.split(","), default=[*OURS, *OTHERS])
    add("--ranks", type=int, default=8)
    add("--tokens", type=int, default=2048, help="of every rank's batch")
    add("--seq", type=int, default=2048, help="tokens of a sequence, at most")
    add("--layers", type=int, help="default: the model's")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the computation")
    add("--parameter-dtype", choices=DTYPES, default="float32")
    add("--checkpoint", action="store_true", help="activation checkpointing of every block")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_output_options(parser)
    add("--one", help=argparse.SUPPRESS)  # measure this strategy in this process and print its line
    add("--as-typed", dest="command", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for strategy in args.strategies:
        if strategy not in (*OURS, *OTHERS):
            parser.error(f"unknown strategy {strategy!r}, expected some of {','.join((*OURS, *OTHERS))}")
    size = SIZES[args.model]
    args.layers = args.layers or size.layers
    args.seq = min(args.seq, args.tokens)
    if min(args.ranks, args.tokens, args.layers) < 1:
        parser.error("--ranks, --tokens and --layers must be at least 1")
    if args.tokens % args.seq:
        parser.error(f"--tokens {args.tokens} is not a multiple of --seq {args.seq}")
    if TENSOR_PARALLEL in args.strategies and size.kv_heads % args.ranks:
        parser.error(f"tensor parallelism cannot cut {size.kv_heads} kv heads for {args.ranks} ranks")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is available")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not args.one:
        complete_output(args, "memory_per_rank", parser.error, torch.device(args.device))
    return args


def main() -> None:
    args = parse_arguments()
    if args.one:
        try:
            print(json.dumps(measure(args.one, args)))
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            print(error, file=sys.stderr)
            sys.exit(DOES_NOT_FIT)
        return
    lines, failures = [], []
    for strategy in args.strategies:
        try:
            line = in_a_process_of_its_own(strategy, args)
        except Failed as failure:
            failures.append(str(failure))
            continue
        if line is None:
            print(f"{strategy} does not fit at all")
            continue
        lines.append(line)
        append_line(args.output, line)
    if lines:
        console(COLUMNS, lines)
    keys = ("layers", "computed_tokens", "peak_bytes", "reserved_bytes", "transient_bytes")
    print(json.dumps({line["strategy"]: {key: line[key] for key in keys} for line in lines}), flush=True)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
