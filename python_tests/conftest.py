"""One thread per process in everything the tests start; the machine may have few cores. Benchmarks can be imported."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))  # last: its models.py is not the tests'
