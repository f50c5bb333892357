"""Small training runs inside of other people's frameworks, each twice: as they shard, and with a ring.

A run is a function of a folder of its own and of a number of steps, called on every rank; it returns a `Run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
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
    """What a framework did with a model, and with the same model on a ring.

    reference: what the framework was compared with. kept: share of the parameters on one rank. resumed, reloaded: the
    largest difference of a weight after going on from the middle, and in what was saved; None: not tried.
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
        """The largest relative difference of two curves; None where they are empty."""
        mine, known = getattr(self, ours), getattr(self, theirs)
        if len(mine) != len(known):
            raise ValueError(f"expected as many {ours} as {theirs}, got {len(mine)} and {len(known)}")
        return max((abs(a - b) / abs(b) for a, b in zip(mine, known, strict=True)), default=None)


def as_torchrun(rank: int, ranks: int) -> None:
    """Tells the environment what torchrun tells its ranks."""
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


def _arguments(folder: str, cls: Any = None, **changes: Any) -> Any:
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


def _trainers(stock: type, ours: type, make: Callable[[], nn.Module], folder: str, steps: int, **options: Any) -> Run:
    """Trains with both; saves in the middle and at the end, goes on from the middle, and loads the end."""
    arguments = options.pop("arguments", None)

    def trained(cls: type, name: str, resume: str | None = None) -> Any:
        args = _arguments(f"{folder}/{name}", arguments, max_steps=steps, save_strategy="steps", save_steps=steps // 2)
        trainer = cls(model=make(), args=args, train_dataset=options.get("data", rows(64)), **options.get("more", {}))
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


def transformers(folder: str, steps: int) -> Run:
    from transformers import AutoModelForCausalLM, Trainer

    from rtp_ext.integrations import RotationTrainer

    return _trainers(Trainer, RotationTrainer, llama, folder, steps, load=AutoModelForCausalLM.from_pretrained)


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

    return _trainers(Trainer, RotationTrainer, adapted, folder, steps, load=load)


def trl(folder: str, steps: int) -> Run:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from rtp_ext.integrations import RotationTrainer

    class RotationSFTTrainer(RotationTrainer, SFTTrainer):
        pass

    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="1", eos_token="2"
    )
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(64)])
    return _trainers(
        SFTTrainer,
        RotationSFTTrainer,
        llama,
        folder,
        steps,
        arguments=SFTConfig,
        data=data,
        more={"processing_class": tokenizer},
        load=AutoModelForCausalLM.from_pretrained,
    )


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


def lightning(folder: str, steps: int) -> Run:
    import lightning as package
    from lightning.pytorch.strategies import DDPStrategy

    from rtp_ext.integrations import RotationStrategy

    class Model(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            self.gain = nn.Parameter(torch.ones(VOCABULARY))  # of the LightningModule itself
            self.losses: list[float] = []
            self.norms: list[float] = []

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            logits = self.model(input_ids=batch["input_ids"]).logits * self.gain
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            total = loss.detach().clone()
            dist.all_reduce(total)
            self.losses.append(total.item() / dist.get_world_size())
            return loss

        def on_before_optimizer_step(self, _: Any) -> None:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    def trained(strategy: Any, last: int, save: str | None = None) -> Model:
        torch.manual_seed(0)
        model = Model()
        trainer = package.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            max_steps=last,
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        loader = DataLoader(rows(2 * dist.get_world_size() * steps), batch_size=2, shuffle=False)
        trainer.fit(model, loader)
        if save is not None:
            trainer.save_checkpoint(save)
        return model

    plain = trained(DDPStrategy(process_group_backend="gloo"), steps)
    model = trained(RotationStrategy(), steps)
    run = Run("DDP", model.losses, plain.losses, model.norms, plain.norms, share(model, count(plain)))
    half = trained(RotationStrategy(save_distributed_checkpoint=False), steps // 2, save=f"{folder}/half.ckpt")
    one = torch.load(f"{folder}/half.ckpt", weights_only=False)["state_dict"] if dist.get_rank() == 0 else None
    end, rings = whole(half), [model, half]
    run.reloaded = 0.0 if one is None else difference({name: one[name] for name in end}, end)
    for each in rings:
        rtp_ext.ring_of(each).close()
    return run


# -- torchtitan --------------------------------------------------------------------------------------------------------


def torchtitan(folder: str, steps: int) -> Run:
    from shared.titan import run

    return run(folder, steps)


RUNS: dict[str, Callable[[str, int], Run]] = {
    each.__name__: each for each in (transformers, peft, trl, accelerate, lightning, torchtitan)
}


def missing(names: Iterable[str]) -> list[str]:
    """Of the packages of some runs, those that are not installed."""
    from importlib.util import find_spec

    return [name for name in names if find_spec(name) is None]


def clean(folder: str) -> str:
    """A folder that is there and empty, on every rank."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return folder
