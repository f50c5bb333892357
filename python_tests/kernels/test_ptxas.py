"""The kernels compile for all GPUs that are supported without a warning, and no thread of them spills registers."""

import ptxas
import pytest


def test_no_kernel_spills():
    if ptxas.nvcc() is None:
        pytest.skip("no nvcc")
    for name, text in ptxas.reports().items():
        entries = ptxas.ENTRY.findall(text)
        assert {int(number) for _, number in entries} == set(ptxas.ARCHITECTURES), name
        spilt = ptxas.SPILLS.findall(text)
        assert len(spilt) >= len(entries), name
        assert all(stores == loads == "0" for stores, loads in spilt), f"{name}:\n{text}"


def test_what_spills_is_noticed():
    """The control, of a line as ptxas writes it."""
    text = "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads"
    assert ptxas.SPILLS.findall(text) == [("12", "16")]
