"""Fine-tunes a Llama on a text with the Trainer of the transformers package: RotationTrainer in the place of Trainer.

    torchrun --nproc-per-node 2 examples/trainer.py --text README.md --steps 60

Runs on GPUs where there are some, else on CPUs. Needs transformers and accelerate. The model is small, untrained, and
reads bytes; for another one, use `AutoModelForCausalLM.from_pretrained(...)` and its tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

import rtp_ext
from rtp_ext.integrations import RotationTrainer

LENGTH = 64  # bytes in a sequence


def sequences(text: bytes) -> list[dict[str, torch.Tensor]]:
    """A text as sequences of bytes, each byte with the next one as label."""
    ids = torch.tensor(list(text))
    cut = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in cut]


def main(arguments: list[str] | None = None) -> tuple[list[float], float]:
    """Returns the losses, by step, and the share of the model's parameters that this rank kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("build/example-trainer"))
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    whole = sum(parameter.numel() for parameter in model.parameters())
    trainer = RotationTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=sequences(options.text.read_bytes()),
        rotate={"bundle": True},  # keyword arguments of fully_rotate
    )
    trainer.train()
    trainer.save_model()  # on every rank; a folder that from_pretrained reads
    trainer.accelerator.wait_for_everyone()
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.2f}, then {losses[-1]:.2f}; {mine} of {whole} parameters on this rank")
        plain = AutoModelForCausalLM.from_pretrained(options.output)
        start = torch.tensor([list(b"rotate")])
        print(bytes(plain.generate(start, max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()))
    rtp_ext.ring_of(model).close()
    return losses, mine / whole


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
