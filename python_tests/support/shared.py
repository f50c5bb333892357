"""Imports what most tests share, in the server of the ranks: see PRELOADED of harness.py."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # under the names by which ranks import them
for _name in ("grids", "hf_models", "live_bytes", "operation_checks", "operations.bundles", "operations.layers"):
    importlib.import_module(_name)
