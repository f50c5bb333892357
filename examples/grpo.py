"""Trains a small language model by reinforcement (GRPO of TRL) to write sevens.

    torchrun --nproc-per-node 2 examples/grpo.py --steps 30

Runs on GPUs where there are some, else on CPUs. Needs transformers and trl. Every rank samples completions of its own,
which end at different lengths: `generate` keeps the ranks in step. The model is small and random; replace it and the
tokenizer by `AutoModelForCausalLM.from_pretrained(...)` and its tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import rtp_ext
from rtp_ext.integrations import RotationTrainer

VOCABULARY, LENGTH, WANTED = 16, 16, 7


class RotationGRPOTrainer(RotationTrainer, GRPOTrainer):
    pass


def numbers() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of numbers: 0 is the unknown token, 1 padding, 2 the end."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2")


def policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=2, pad_token_id=1, **sizes))


def sevens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Returns the reward: the share of sevens among the tokens of a completion."""
    return [ids.count(WANTED) / len(ids) for ids in completion_ids]


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    """Returns the log entries, by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("build/example-grpo"))
    options = parser.parse_args(arguments)

    trainer = RotationGRPOTrainer(
        model=policy(),
        reward_funcs=sevens,
        args=GRPOConfig(
            output_dir=str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=LENGTH,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{3 + number % 13} 5"} for number in range(256)]),
        processing_class=numbers(),
        rotate={"bundle": True},  # keyword arguments of fully_rotate
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    if trainer.is_world_process_zero():
        for entry in (log[0], log[-1]):
            shortest, longest = entry["completions/min_length"], entry["completions/max_length"]
            print(f"reward {entry['reward']:.2f}, completions of {shortest:.0f} to {longest:.0f} tokens")
    rtp_ext.ring_of(trainer.model).close()
    return log


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
