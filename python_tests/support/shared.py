"""Imports what most tests share, in the server of the ranks: see PRELOADED of harness.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # under the names by which ranks import them

import grids  # noqa: E402, F401
import harness  # noqa: E402, F401
import hf_models  # noqa: E402, F401
import live_bytes  # noqa: E402, F401
import operation_checks  # noqa: E402, F401
import operations.bundles  # noqa: E402, F401
import pretended_hosts  # noqa: E402, F401
import selective  # noqa: E402, F401
