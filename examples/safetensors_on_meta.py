"""Loads a model that is never whole: it is built on the meta device and converted, then each rank reads its slices.

    torchrun --nproc-per-node 2 examples/safetensors_on_meta.py FOLDER

FOLDER comes from save_pretrained or from a download by huggingface_hub; without it, the first rank writes a small
model. Runs on GPUs where there are some, else on CPUs. Needs transformers and safetensors.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import rtp_ext


def write_small_model(folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)


def load(folder: str, device: str) -> torch.nn.Module:
    """Returns a converted model with the weights of a folder."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    rtp_ext.fully_rotate(model)
    model.to_empty(device=device)
    # checkpoints do not hold these buffers
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    rtp_ext.load_safetensors(model, folder)
    return model


def main(arguments: list[str] | None = None) -> tuple[float, int]:
    """Returns the loss of one batch, and the bytes of parameters on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    folder = [options.folder]
    if options.folder is None and dist.get_rank() == 0:
        folder = [tempfile.mkdtemp()]
        write_small_model(folder[0])
    dist.broadcast_object_list(folder)  # the folder of the first rank

    model = load(folder[0], device)
    ids = (torch.arange(64, device=device).view(2, 32) + dist.get_rank()) % 256
    loss = model(input_ids=ids, labels=ids).loss.item()
    kept = sum(parameter.to_local().nbytes for parameter in model.parameters())
    if dist.get_rank() == 0:
        whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        print(f"loss {loss:.3f}; {kept} of {whole} bytes of parameters on this rank")
    rtp_ext.ring_of(model).close()
    return loss, kept


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
