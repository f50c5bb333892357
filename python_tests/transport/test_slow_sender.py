"""A small message that is posted while the sender thread still announces a large one arrives."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("slow_sender.py")
# The clock of all threads but the first, read between the copy of a message and its announcement.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
typedef int (*Clock)(clockid_t, struct timespec*);
int clock_gettime(clockid_t clock, struct timespec* now) {
  static Clock real;
  if (!real) real = (Clock)dlsym(RTLD_NEXT, "clock_gettime");
  if (gettid() != getpid() && getenv("SLOW_CLOCK")) usleep(30000);
  return real(clock, now);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_small_message_after_a_large_one(tmp_path):
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "clock.c", "-o", library, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
