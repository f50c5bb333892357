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
    compiled, loaded = (None, None) if versions is None else map(_native.version_name, versions)
    card |= {"nccl_compiled": compiled, "nccl_loaded": loaded}
    Path(sys.argv[1]).write_text(json.dumps(card, indent=1) + "\n")
    print(f"{card['device']}, torch {card['torch']}, CUDA {card['cuda']}, NCCL {loaded} (compiled against {compiled})")


if __name__ == "__main__":
    main()
