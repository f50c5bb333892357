"""examples/replace_ring.py: a ring dies, the other keeps its state, and the new one gets it from there."""

from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/replace_ring.py"


def test_a_new_ring_gets_its_shards_from_its_like(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    import replace_ring

    calm = replace_ring.main(["--steps", "12"])
    rough = replace_ring.main(["--steps", "12", "--lose-at", "7"])
    assert (calm["replaced"], rough["replaced"]) == (0, 1)
    assert calm["received_bytes"] == [0] * 4 and abs(rough["loss"] - calm["loss"]) < 1e-6
    whole = 8 * (16 * 64 + 64 + 64 * 64 + 64 + 2 * 64 + 64 * 4 + 4)  # of the parameters; AdamW has two more of each
    old, new = rough["received_bytes"][:2], rough["received_bytes"][2:]
    assert old == [0, 0] and all(1.4 * whole < got < 1.7 * whole for got in new), rough
