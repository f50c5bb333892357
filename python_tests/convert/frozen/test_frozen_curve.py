"""Adapters around a model that transformers has loaded in 4 bits: the loss curve of one process whose products are
those of bitsandbytes. Skipped where that package is not installed."""

import copy

import peft
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

import rtp_ext

transformers = pytest.importorskip("transformers")
STEPS, CLOSE, TOKENS, ROWS = 50, 1e-5, 16, 4
VOCABULARY = 64


def _save(folder: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
        initializer_range=0.1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def _load(folder: str) -> nn.Module:
    """The model in 4 bits, with adapters."""
    quantized = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, quantization_config=quantized, dtype=torch.float32, device_map={"": "cpu"})
    torch.manual_seed(1)
    options = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, options).train()


def _swapped(model: nn.Module) -> nn.Module:
    """The control: the two codes of each byte in the wrong order."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        if parameter.dtype == torch.uint8:
            parameter.data = parameter.data << 4 | parameter.data >> 4
    return model


def _batch(step: int, rows: slice) -> torch.Tensor:
    starts = torch.randint(VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step))
    return ((starts + 5 * torch.arange(TOKENS)) % VOCABULARY)[rows]


def _curve(model: nn.Module, rows: slice, steps: int = STEPS) -> torch.Tensor:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for step in range(steps):
        ids = _batch(step, rows)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def _curves(rank, ranks, folder):
    loaded = _load(folder)
    curves = []
    for model in (loaded, _swapped(loaded)):
        rotated = rtp_ext.fully_rotate(copy.deepcopy(model), transport="shm")
        curves.append(_curve(rotated, slice(ROWS * rank, ROWS * (rank + 1))))
        dist.all_reduce(curves[-1])
        rtp_ext.ring_of(rotated).close()
    return [curve / ranks for curve in curves]


def test_the_loss_curve_of_bitsandbytes(tmp_path):
    pytest.importorskip("bitsandbytes")
    _save(str(tmp_path))
    expected = _curve(_load(str(tmp_path)), slice(None))
    found, swapped = run_ranks(_curves, 2, str(tmp_path), timeout=240.0)[0]
    off, wrong = ((each / expected - 1).abs().max().item() for each in (found, swapped))
    print(f"largest relative difference of {STEPS} losses: {off:.1e}; with swapped codes {wrong:.1e}")
    assert off < CLOSE < wrong, f"{off}, with codes in the wrong order {wrong}"
    assert expected[-1] < 0.8 * expected[0], "control: it learns"
