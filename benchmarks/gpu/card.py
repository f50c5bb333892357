"""`python benchmarks/gpu/card.py FILE` writes what this machine is, with the NCCL that rtp_ext was compiled against."""

import json
import sys
from pathlib import Path

import torch

from rtp_ext import _native

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import command_line, environment_card


def main() -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    card = environment_card(device, command_line())
    versions = _native.nccl_versions()
    card |= {"nccl_compiled": None if versions is None else _native.version_name(versions[0])}
    Path(sys.argv[1]).write_text(json.dumps(card, indent=1) + "\n")
    told = {name: card[name] for name in ("device", "torch", "cuda", "nccl", "nccl_compiled", "commit")}
    print(", ".join(f"{name} {value}" for name, value in told.items()))


if __name__ == "__main__":
    main()
