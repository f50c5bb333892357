"""The GPU tests skip for reasons of hardware alone: what the package no longer has makes them fail."""

import importlib.util
from pathlib import Path

import pytest

import rtp_ext

SPEC = importlib.util.spec_from_file_location("gpu_support", Path(__file__).parents[1] / "gpu" / "support.py")
support = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(support)


def test_only_a_missing_link_skips(monkeypatch):
    def without_prefetch(size, *, device="cpu", link=None):
        raise rtp_ext.RotationError("no such link here")

    monkeypatch.setattr(rtp_ext.Ring, "emulated", without_prefetch)
    with pytest.raises(TypeError, match="prefetch"):
        support.emulated(2, prefetch=0)
    with pytest.raises(rtp_ext.RotationError, match="no such link"):
        support.emulated(2)
    with pytest.raises(pytest.skip.Exception, match=r"pcie.*no such link"):
        support.emulated(2, link="pcie")
