"""One thread per process in everything the tests start; the machine may have few cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
