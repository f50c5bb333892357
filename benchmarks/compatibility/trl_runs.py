"""Small runs of TRL's trainers: supervised fine-tuning, GRPO on completions that end at different lengths, and DPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from compatibility.framework_runs import VOCABULARY, Run, llama, rows, trained_twice
from rtp_ext.integrations import RotationTrainer

LONGEST = 10  # tokens of a completion
END = 2


class RotationSFTTrainer(RotationTrainer, SFTTrainer):
    pass


class RotationGRPOTrainer(RotationTrainer, GRPOTrainer):
    pass


class RotationDPOTrainer(RotationTrainer, DPOTrainer):
    pass


def numbers() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token=str(END))


def _texts(count: int, lengths: Callable[[int], int], step: int) -> list[str]:
    """Sequences in which each number counts on by `step`."""
    return [
        " ".join(str(3 + (number + step * place) % (VOCABULARY - 3)) for place in range(lengths(number)))
        for number in range(count)
    ]


def sft(folder: str, steps: int) -> Run:
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(64)])
    return trained_twice(
        SFTTrainer,
        RotationSFTTrainer,
        llama,
        folder,
        steps,
        arguments=SFTConfig,
        data=data,
        more=lambda: {"processing_class": numbers()},
        load=AutoModelForCausalLM.from_pretrained,
    )


def ending() -> torch.nn.Module:
    """Returns a model whose config sets the token that ends a completion, in float64: in float32 twenty steps of GRPO
    amplify the rounding differences of another summation order to 1e-4."""
    model: Any = llama().double()
    model.config.update({"eos_token_id": END, "pad_token_id": 1, "bos_token_id": None})
    model.generation_config.update(eos_token_id=END, pad_token_id=1, bos_token_id=None)
    return model


def small(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: how small the tokens of a completion are."""
    return [1 - sum(ids) / len(ids) / VOCABULARY for ids in completion_ids]


def grpo(folder: str, steps: int, rotate: Callable[[], dict[str, Any]] = dict) -> Run:
    changes = {"num_generations": 4, "max_completion_length": LONGEST}
    changes |= {"generation_kwargs": {"sequence_bias": [[[END], 2.5]]}}  # one token of six ends a completion
    return trained_twice(
        GRPOTrainer,
        RotationGRPOTrainer,
        ending,
        folder,
        steps,
        arguments=GRPOConfig,
        changes=changes,
        data=Dataset.from_list([{"prompt": text} for text in _texts(64, lambda number: 1 + number % 5, 3)]),
        more=lambda: {"processing_class": numbers(), "reward_funcs": small},
        load=AutoModelForCausalLM.from_pretrained,
        rotate=rotate,
    )


def dpo(folder: str, steps: int) -> Run:
    prompts = _texts(64, lambda number: 2 + number % 4, 3)
    chosen = _texts(64, lambda number: 2 + number % 7, 3)
    rejected = _texts(64, lambda number: 1 + number % 5, 5)
    data = [
        {"prompt": prompt, "chosen": f" {good}", "rejected": f" {bad}"}
        for prompt, good, bad in zip(prompts, chosen, rejected, strict=True)
    ]
    return trained_twice(
        DPOTrainer,
        RotationDPOTrainer,
        ending,
        folder,
        steps,
        arguments=DPOConfig,
        data=Dataset.from_list(data),
        more=lambda: {"processing_class": numbers(), "ref_model": ending()},
        load=AutoModelForCausalLM.from_pretrained,
    )
