"""Helpers of the tests in this folder: rings over every link, and the file for the results of a run."""

import functools
import json
import os
import sys
import traceback
from typing import Any

import pytest
import torch
from harness import run_ranks

import rtp_ext

LINKS = ["sm-local", "ce-local", "ce-local:4", "nccl-self", "pcie"]
run_gpu_ranks = functools.partial(run_ranks, fresh=os.environ.get("FAKE_GPU") != "1")
BROKEN = 70  # exit status of a worker whose CUDA context is lost


def emulated(ranks: int, **options: Any) -> rtp_ext.Ring:
    """An emulated ring on the GPU; skips the test where this machine has no such link. All else is an error."""
    try:
        return rtp_ext.Ring.emulated(ranks, device="cuda", **options)
    except rtp_ext.RotationError as error:
        if options.get("link") is None:
            raise
        pytest.skip(f"{options}: {error}")  # a link that this driver or this NCCL does not have


def record(**facts: Any) -> None:
    """Appends what a test found to the file that RTP_TEST_RECORD names, if it names one; and prints it."""
    line = json.dumps(facts)
    print(line)
    if path := os.environ.get("RTP_TEST_RECORD"):
        with open(path, "a") as file:
            file.write(line + "\n")


def end_if_broken() -> None:
    """Raises an error that CUDA reports for earlier work.

    After most errors every call of the process fails: it ends, and pytest-xdist replaces a worker for the rest.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            if "PYTEST_XDIST_WORKER" in os.environ:
                traceback.print_exc(file=sys.__stderr__)
                os._exit(BROKEN)
            pytest.exit(f"no later test can pass in this process: {error}")  # a status would suppress the summary
        raise


def nccl_version() -> tuple[int, ...]:
    """Returns the version of the loaded library, which need not be the one that torch was built with."""
    versions = rtp_ext._native.nccl_versions()
    if versions is None:
        pytest.skip("rtp_ext was built without CUDA")
    code = versions[1]
    return code // 10000, code // 100 % 100, code % 100


def several_ranks_problem(ranks: int) -> str | None:
    """Why `ranks` NCCL ranks cannot run here; None if they can."""
    if torch.cuda.device_count() >= ranks:
        return None
    if nccl_version() < (2, 30):
        version = ".".join(map(str, nccl_version()))
        return f"{torch.cuda.device_count()} GPU for {ranks} ranks takes NCCL 2.30, {version} is loaded"
    return None


def share_gpu(rank: int, ranks: int, log: str) -> None:
    """Sets up one rank of several, before its first NCCL call: its GPU, and where ranks share one, what that takes.

    NCCL's log goes to files that start with `log`. Its CTAs are bounded so that the kernels of all ranks fit at once.
    """
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,P2P"
    os.environ["NCCL_DEBUG_FILE"] = f"{log}.rank{rank}.%p"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # read when the context is made, which set_device does
    if torch.cuda.device_count() < ranks:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        os.environ["NCCL_MAX_CTAS"] = "4"
    torch.cuda.set_device(rank % torch.cuda.device_count())
