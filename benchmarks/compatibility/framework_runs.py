"""Small training runs inside of other people's frameworks, each twice: as they shard, and with a ring.

A run is a function of a folder of its own and of a number of steps, called on every rank; it returns a `Run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import rtp_ext

VOCABULARY, LENGTH = 64, 16
LR = 5e-3


@dataclass
class Run:
    """The results of a framework with a model as it shards it, and with the same model on a ring.

    reference: the run that the framework was compared with. kept: share of the parameters on one rank. resumed,
    reloaded: the largest difference of a weight after resuming from the middle, and in the saved files; None: not run.
    """

    reference: str
    losses: list[float]
    reference_losses: list[float]
    norms: list[float] = field(default_factory=list)
    reference_norms: list[float] = field(default_factory=list)
    kept: float | None = None
    resumed: float | None = None
    reloaded: float | None = None

    def worst(self, ours: str, theirs: str) -> float | None:
        """The largest relative difference of two curves; None where they are empty. Values near 0, as some losses of
        GRPO, are compared with a hundredth of the largest one."""
        mine, known = getattr(self, ours), getattr(self, theirs)
        if len(mine) != len(known):
            raise ValueError(f"expected as many {ours} as {theirs}, got {len(mine)} and {len(known)}")
        floor = max(map(abs, known), default=0.0) / 100
        return max((abs(a - b) / max(abs(b), floor) for a, b in zip(mine, known, strict=True)), default=None)


def as_torchrun(rank: int, ranks: int) -> None:
    """Sets the environment variables that torchrun sets for its ranks."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost")
    os.environ["TORCHELASTIC_RUN_ID"] = "none"


def rows(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences in which each token counts on by three."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row.clone()} for row in (starts + 3 * torch.arange(LENGTH)) % VOCABULARY]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, **sizes)
    )


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if actual.keys() != expected.keys():
        raise ValueError(f"expected parameters {sorted(expected)}, got {sorted(actual)}")
    return max((actual[name] - value).abs().max().item() for name, value in expected.items())


def share(model: nn.Module, total: int) -> float:
    kept = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    return kept / total


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# -- transformers, peft, TRL -------------------------------------------------------------------------------------------


def arguments_of(folder: str, cls: Any = None, **changes: Any) -> Any:
    from transformers import TrainingArguments

    return (cls or TrainingArguments)(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=LR,
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,  # TRL's default, in which sums in another order differ by 1e-3
        **changes,
    )


def _curve(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def trained_twice(
    stock: type, ours: type, make: Callable[[], nn.Module], folder: str, steps: int, **options: Any
) -> Run:
    """Trains with both; saves in the middle and at the end, goes on from the middle, and loads the end.

    `options`: `load` reads a saved model; `arguments`, the class of the arguments, and `changes`, some of them; `data`;
    `more` makes what else both trainers take; `rotate`, the options of a ring.
    """
    arguments, changes = options.pop("arguments", None), options.pop("changes", {})

    def trained(cls: type, name: str, resume: str | None = None) -> Any:
        saving = {"max_steps": steps, "save_strategy": "steps", "save_steps": steps // 2}
        args = arguments_of(f"{folder}/{name}", arguments, **saving, **changes)
        more = {**options.get("more", dict)(), **({"rotate": options.get("rotate", dict)()} if cls is ours else {})}
        trainer = cls(model=make(), args=args, train_dataset=options.get("data", rows(64)), **more)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    plain = trained(stock, "plain")
    rotated = trained(ours, "rotated")
    total, end = count(plain.model), whole(rotated.model)
    run = Run(
        "DDP",
        _curve(rotated, "loss"),
        _curve(plain, "loss"),
        _curve(rotated, "grad_norm"),
        _curve(plain, "grad_norm"),
        share(rotated.model, total),
    )
    again = trained(ours, "again", resume=f"{folder}/rotated/checkpoint-{steps // 2}")
    run.resumed = difference(whole(again.model), end)
    dist.barrier()
    run.reloaded = difference(whole(options["load"](f"{folder}/rotated/checkpoint-{steps}")), end)
    for trainer in (rotated, again):
        rtp_ext.ring_of(trainer.model).close()
    return run


def transformers(folder: str, steps: int, rotate: Callable[[], dict[str, Any]] = dict) -> Run:
    from transformers import AutoModelForCausalLM, Trainer

    from rtp_ext.integrations import RotationTrainer

    load = AutoModelForCausalLM.from_pretrained
    return trained_twice(Trainer, RotationTrainer, llama, folder, steps, load=load, rotate=rotate)


def peft(folder: str, steps: int) -> Run:
    import peft as package
    from transformers import Trainer

    from rtp_ext.integrations import RotationTrainer

    def adapted() -> nn.Module:
        config = package.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(1)
        return package.get_peft_model(llama(), config)

    def load(saved: str) -> nn.Module:
        return package.PeftModel.from_pretrained(llama(), saved)

    return trained_twice(Trainer, RotationTrainer, adapted, folder, steps, load=load)


# -- accelerate --------------------------------------------------------------------------------------------------------


def accelerate(folder: str, steps: int) -> Run:
    from accelerate import Accelerator

    from rtp_ext.integrations import RotationAccelerator

    def trained(cls: type, first: int, last: int, resume: str | None = None) -> tuple[Any, ...]:
        accelerator = cls(cpu=True)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(4 * steps), batch_size=2))
        if resume is not None:
            accelerator.load_state(resume)
        losses, norms = [], []
        for batch in list(loader)[first:last]:
            loss = model(**batch).loss
            accelerator.backward(loss)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        return accelerator, accelerator.unwrap_model(model), losses, norms

    _, plain, known, known_norms = trained(Accelerator, 0, steps)
    _, model, losses, norms = trained(RotationAccelerator, 0, steps)
    run = Run("DDP", losses, known, norms, known_norms, share(model, count(plain)))
    accelerator, half, *_ = trained(RotationAccelerator, 0, steps // 2)
    accelerator.save_state(f"{folder}/state")
    _, again, *_ = trained(RotationAccelerator, steps // 2, steps, resume=f"{folder}/state")
    run.resumed = difference(whole(again), whole(model))
    state = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        copied = llama()
        copied.load_state_dict(state)
        mine = whole(copied)
    end = whole(model)
    run.reloaded = difference(mine, end) if accelerator.is_main_process else 0.0
    for each in (model, half, again):
        rtp_ext.ring_of(each).close()
    return run


# -- Lightning ---------------------------------------------------------------------------------------------------------


class _Batches:
    """This rank's batches of an epoch, a different one for every step. Lightning saves and restores its position."""

    def __init__(self, steps: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.batches = [
            torch.stack([row["input_ids"] for row in rows(2 * ranks, seed=step)[2 * rank : 2 * rank + 2]])
            for step in range(steps)
        ]
        self.done = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.done = self.done, 0
        for place in range(first, len(self.batches)):
            self.done = place + 1
            yield self.batches[place]
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def lightning(folder: str, steps: int, rotate: Callable[[], dict[str, Any]] = dict) -> Run:
    import lightning as package
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from rtp_ext.integrations import RotationStrategy

    middle = steps // 2

    class Model(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            self.gain = nn.Parameter(torch.ones(VOCABULARY))  # of the LightningModule itself
            self.losses: list[float] = []
            self.norms: list[float] = []

        def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
            logits = self.model(input_ids=ids).logits * self.gain
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            total = loss.detach().clone()
            dist.all_reduce(total)
            self.losses.append(total.item() / dist.get_world_size())
            return loss

        def on_before_optimizer_step(self, _: Any) -> None:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def trained(strategy: Any, name: str, resume: str | None = None) -> Model:
        torch.manual_seed(0)
        model = Model()
        saving = ModelCheckpoint(
            f"{folder}/{name}", "{step}", every_n_train_steps=middle, save_top_k=-1, enable_version_counter=False
        )
        trainer = package.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            max_steps=steps,
            gradient_clip_val=0.5,
            logger=False,
            callbacks=[saving],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        # an epoch is two thirds of the run: it goes on in the middle of one, and into the next
        trainer.fit(model, _Batches(2 * steps // 3), ckpt_path=resume)
        return model

    plain = trained(DDPStrategy(process_group_backend="gloo"), "plain")
    models = []
    for name, shards in (("shards", True), ("whole", False)):
        for folder_of_run, resume in ((name, None), (f"{name}-again", f"{folder}/{name}/step={middle}.ckpt")):
            strategy = RotationStrategy(rotate(), save_distributed_checkpoint=shards)
            models.append(trained(strategy, folder_of_run, resume))
    first = models[0]
    run = Run("DDP", first.losses, plain.losses, first.norms, plain.norms, share(first, count(plain)))
    end = whole(first)
    run.resumed = max(difference(whole(model), end) for model in models)
    if [model.losses for model in models[1::2]] != [first.losses[middle:]] * 2:
        raise AssertionError(
            f"resumed: expected losses {first.losses[middle:]}, got {[m.losses for m in models[1::2]]}"
        )
    saved = torch.load(f"{folder}/whole/step={2 * middle}.ckpt", weights_only=False)["state_dict"]
    run.reloaded = difference({name: saved[name] for name in end}, end)
    for each in models:
        rtp_ext.ring_of(each).close()
    return run
