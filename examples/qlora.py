"""QLoRA: trains adapters around a frozen Llama in 4 bits; base and adapters rotate, 1/R of them on every rank.

    torchrun --nproc-per-node 2 examples/qlora.py --steps 40
    torchrun --nproc-per-node 2 examples/qlora.py --steps 40 --resume build/example-qlora/checkpoint-20
    torchrun --nproc-per-node 2 examples/qlora.py --steps 40 --frozen none    # LoRA: the base in its own dtype

Runs on GPUs where there are some, else on CPUs. Needs transformers, accelerate and peft. The base is small and random;
replace it by `AutoModelForCausalLM.from_pretrained(...)`. The run saves the adapters only, and at half of the steps a
checkpoint from which a run resumes, also on another number of ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import rtp_ext
from rtp_ext.integrations import RotationTrainer

VOCABULARY, LENGTH = 64, 32


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def counting(count: int) -> list[dict[str, torch.Tensor]]:
    """Returns sequences in which each token is the previous one plus five."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(1))
    rows = (starts + 5 * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


def main(arguments: list[str] | None = None) -> tuple[list[float], Path]:
    """Returns the losses, by step, and the folder of the adapters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("build/example-qlora"))
    parser.add_argument("--frozen", choices=["nf4", "mxfp4", "int8", "none"], default="nf4", help="bits of the base")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="a folder that an earlier run has saved")
    options = parser.parse_args(arguments)

    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base(), lora)
    trainer = RotationTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="steps",
            save_steps=max(1, options.steps // 2),
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=counting(512),
        rotate={"frozen": None if options.frozen == "none" else options.frozen},
    )
    trainer.train(resume_from_checkpoint=None if options.resume is None else str(options.resume))
    trainer.save_model()  # on every rank
    trainer.accelerator.wait_for_everyone()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.2f}, then {losses[-1]:.2f}")
        print(f"{sum(p.to_local().nbytes for p in model.parameters()) / 2**20:.2f} MiB of parameters on this rank")
        peft.PeftModel.from_pretrained(base(), options.output)  # on one process: adapters around the plain base
        print(f"adapters in {options.output}: {sorted(file.name for file in options.output.glob('adapter*'))}")
    rtp_ext.ring_of(model).close()
    return losses, options.output


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
