"""`python -m shared.remote FOLDER`: one rank on a made host; see `launch_on_hosts`."""

import sys
from pathlib import Path

from shared.launch import run_on_host

if __name__ == "__main__":
    run_on_host(Path(sys.argv[1]))
