"""Fine-tunes a pretrained model on a text file: all of its weights, or adapters (LoRA) around them.

    torchrun --nproc-per-node 2 examples/finetune.py --model FOLDER --data text.txt --save run
    torchrun --nproc-per-node 4 examples/finetune.py --model FOLDER --data text.txt --save run --resume
    torchrun --nproc-per-node 2 examples/finetune.py --model FOLDER --data text.txt --lora-rank 16 --frozen nf4
    python examples/finetune.py --model FOLDER --data text.txt    # in one process

FOLDER has config.json, safetensors and a tokenizer, as save_pretrained writes or huggingface_hub downloads them. No
rank holds the whole model: it is built without values, and each rank reads its slices. Adapters are small, and whole on
every rank. The folder of --save gets checkpoints, from which --resume goes on, on any number of ranks, and at the end
`model` for from_pretrained: the model, or the adapters. Runs on GPUs where there are some, else on CPUs. Needs
transformers, accelerate and safetensors, for adapters also peft.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rtp_ext


def load(options: argparse.Namespace, device: str) -> tuple[nn.Module, rtp_ext.Ring]:
    """Returns the converted model with the weights of --model, in adapters where they are asked for, and its ring."""
    stored = torch.bfloat16 if options.bf16 and options.lora_rank else torch.float32
    with init_empty_weights():  # parameters on the meta device; buffers, which no file may have, with their values
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model), dtype=stored)
    model.tie_weights()  # as the configuration says: the context makes each parameter anew
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    model.requires_grad_(options.lora_rank == 0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.bf16 else None)
    rtp_ext.fully_rotate(model, mp_policy=policy, frozen=options.frozen)
    model.to_empty(device=device)
    for name, values in buffers.items():
        model.get_buffer(name).copy_(values)
    rtp_ext.load_safetensors(model, options.model)
    ring = rtp_ext.ring_of(model)
    if options.lora_rank:
        import peft

        torch.manual_seed(options.seed)  # the same adapters on every rank
        shape = {"r": options.lora_rank, "lora_alpha": 2 * options.lora_rank, "target_modules": "all-linear"}
        model = peft.get_peft_model(model, peft.LoraConfig(**shape, task_type="CAUSAL_LM"))
    return model.train(), ring


def sequences(options: argparse.Namespace) -> torch.Tensor:
    """Returns the tokens of --data in rows, [N, length]."""
    ids = AutoTokenizer.from_pretrained(options.model)(options.data.read_text(), verbose=False)["input_ids"]
    rows = torch.tensor(ids)[: len(ids) // options.length * options.length].view(-1, options.length)
    if len(rows) < options.batch:
        raise SystemExit(f"expected at least {options.batch} sequences of {options.length} tokens, got {len(rows)}")
    return rows


def batch(rows: torch.Tensor, step: int, options: argparse.Namespace) -> torch.Tensor:
    """Returns the sequences [batch, length] of a step, of all ranks together: every epoch has an order of its own."""
    epoch, place = divmod(step, len(rows) // options.batch)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed + epoch))
    return rows[order[place * options.batch : (place + 1) * options.batch]]


def learning_rate(step: int, options: argparse.Namespace) -> float:
    return options.lr * min((step + 1) / options.warmup, 1 - step / options.steps)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns what a checkpoint holds: what is trained, this rank's shards of it."""
    states = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    return dict(zip(("model", "optimizer"), states, strict=True))


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes a checkpoint, which gets its name once it is complete. Collective."""
    dcp.save(state, checkpoint_id=str(folder / "unfinished"))
    if dist.get_rank() == 0:
        os.replace(folder / "unfinished", folder / f"step_{step}")
    dist.barrier()


def last_step(options: argparse.Namespace) -> int:
    """Returns the step of the last checkpoint, 0 without --resume. Collective."""
    found = [max((int(path.name[5:]) for path in options.save.glob("step_*")), default=0)]
    dist.broadcast_object_list(found)  # what the first rank sees
    if found[0] and not options.resume:
        raise SystemExit(f"expected --resume, or a folder without checkpoints, got step_{found[0]} in {options.save}")
    return found[0]


def main(arguments: list[str] | None = None) -> tuple[int, list[float]]:
    """Returns the first step of this run, and the mean losses of all ranks, by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--save", type=Path, metavar="FOLDER", default=Path("build/example-finetune"))
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder of --save")
    parser.add_argument("--lora-rank", type=int, default=0, help="of adapters around all linear layers; 0: none")
    parser.add_argument("--frozen", choices=["nf4", "mxfp4", "int8"], help="bits of the weights under adapters")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, of all ranks together")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if min(options.steps, options.batch, options.length, options.warmup, options.log_every, options.save_every) < 1:
        parser.error("expected numbers of at least 1 for steps, batch, length, warmup, log-every and save-every")
    if options.frozen and not options.lora_rank:
        parser.error("--frozen: expected --lora-rank, since weights that train have no bits to freeze")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **alone)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.batch % ranks:
        raise SystemExit(f"expected a --batch that {ranks} ranks divide, got {options.batch}")

    (model, ring), rows = load(options, device), sequences(options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    if first := last_step(options):
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=str(options.save / f"step_{first}"))
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **states, options=StateDictOptions(strict=False))

    losses: list[float] = []
    start = time.perf_counter()
    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        ids = batch(rows, step, options).chunk(ranks)[rank].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0 and (step + 1) % options.log_every == 0:
            speed = options.log_every * options.batch * options.length / (time.perf_counter() - start)
            start = time.perf_counter()
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {speed:.0f} tokens a second", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(options.save, step + 1, state_of(model, optimizer))
    model.save_pretrained(options.save / "model")  # on every rank; rank 0 writes
    if rank == 0:
        AutoTokenizer.from_pretrained(options.model).save_pretrained(options.save / "model")
    ring.close()
    return first, losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
