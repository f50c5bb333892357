"""The memory of rotation, calculated by hand: shards, chunks, slots and pool; and the tiling of a device."""

import math

import pytest
import torch

from rtp_ext import _native


def test_shards_are_cut_as_chunks_are():
    for extent in (0, 1, 5, 12, 131):
        for ranks in (1, 2, 3, 4, 7):
            sizes = _native.shard_sizes(extent, ranks)
            chunks = [len(chunk) for chunk in torch.empty(extent, 0).chunk(ranks)] if extent else []
            assert sizes == chunks + [0] * (ranks - len(chunks))
            assert sizes == [_native.shard_size(extent, ranks, owner) for owner in range(ranks)]
    with pytest.raises(ValueError, match="extent >= 0 and ranks >= 1, got 4 and 0"):
        _native.shard_sizes(4, 0)


def operation(*shards, key="linear"):
    """An operation whose largest shards have these shapes, by the number of ranks."""

    def facts(ranks):
        wholes = [(ranks * rows, *rest) for rows, *rest in shards]
        return _native.OperationFacts(key, [_native.ParameterFacts(whole) for whole in wholes])

    return facts


def test_pieces_are_the_largest_that_fit():
    for rows in (0, 1, 7, 64):
        for cap in (0, 1, 39, 40, 41, 80, 300, 10**6):
            count, each = operation((rows, 9), (rows,))(1).chunks(1, 4, cap)
            assert count >= 1 and count * each >= rows and (count - 1) * each < max(rows, 1)
            if cap == 0:
                assert count == 1
            else:  # 40 bytes a row
                assert each == 1 or each * 40 <= cap
                assert each == max(rows, 1) or (each + 1) * 40 > cap
            whole = operation((rows, 9), key="partial linear")(1)
            assert whole.chunks(1, 4, cap) == (1, max(rows, 1)), "control: what may not travel in pieces"


def footprint(operations, ranks=3, **changed):
    options = dict(in_place=False, sends_anywhere=True, receives_anywhere=True, cast=False)
    options |= dict(compute_bytes=2, reduce_bytes=4, slot_cap=0)
    held = _native.footprint([facts(ranks) for facts in operations], ranks=ranks, **{**options, **changed})
    return sorted(held.free_weight), sorted(held.free_gradient), held.weight.peak_bytes, held.gradient.peak_bytes


def test_slots_of_one_layer():
    """33 numbers and 3 of a bias: 66 and 6 bytes take 128 and 64 of a slot, as float32 132 and 12 take 192 and 64."""
    layer = [operation((3, 11), (3,))]
    assert footprint(layer) == ([192, 192], [256, 256], 384, 512)
    assert footprint(layer, ranks=2) == ([192], [256], 192, 256), "one hop needs one slot; a gradient's lands at home"
    assert footprint(layer, ranks=2, receives_anywhere=False) == ([192], [256, 256], 192, 512)
    assert footprint(layer, ranks=1) == ([], [], 0, 0)
    assert footprint(layer, ranks=1, cast=True) == ([192], [], 192, 0)
    assert footprint(layer, cast=True) == ([192] * 3, [256, 256], 576, 512), "a staged copy"
    assert footprint(layer, sends_anywhere=False) == footprint(layer, cast=True)
    assert footprint(layer, in_place=True) == ([192], [256, 256], 192, 512)
    assert footprint(layer, in_place=True, cast=True) == footprint(layer, cast=True), "a copy cannot travel in place"
    assert footprint(layer, late=1) == ([192, 192], [256, 256], 384, 512), "with nothing after it"
    assert footprint(layer, ranks=2, late=1) == ([192], [256, 256], 192, 512), "nothing lands at home"
    assert footprint(layer, slot_cap=2 * 12 * 4) == ([128, 128], [192, 192], 256, 384), "two rows, then one"


def test_the_pool_keeps_slots_and_small_ones_make_way():
    def sized(*elements):
        return [operation((1, count)) for count in elements]

    one, two = footprint(sized(32), ranks=2), footprint(sized(32, 32), ranks=2)
    assert one == ([64], [128], 64, 128)
    assert two == ([64, 64], [128], 128, 128), "the second layer's first shard is sent ahead"
    assert footprint(sized(32, 32), ranks=2, in_place=True) == one, "not where it travels in place"
    for ahead in (63, 64, 127, 128, 192):  # a shard beside those that are ahead
        slots = 2 if ahead < 128 else 1 + ahead // 64
        expected = ([64] * slots, [128], 64 * slots, 128)
        assert footprint(sized(32, 32, 32), ranks=2, look_ahead=ahead) == expected, "into the backward, too"
    assert footprint(sized(32), ranks=2, look_ahead=64) == ([64, 64], [128], 128, 128), "the backward's, sent ahead"
    assert footprint(sized(32), ranks=2, look_ahead=64, prefetch=False) == one
    whole = footprint(sized(*[32] * 6), look_ahead=None)
    assert whole == footprint(sized(*[32] * 6), look_ahead=3 * 64) == ([64] * 4, [128, 128], 256, 256), "three slots"
    assert footprint(sized(*[32] * 6), ranks=4, look_ahead=None, route="direct")[0] == [64] * 4
    cast = footprint(sized(*[32] * 6), cast=True, look_ahead=None)[0]
    assert len(cast) == 1 + 3, "a shard in use, and two shards and a staged copy ahead"
    for layers, late in ((2, 1), (3, 1), (4, 2)):
        _, gradients, _, most = footprint(sized(*[32] * layers), late=late)
        assert (gradients, most) == ([128] * (2 + 2 * late), 256 + 256 * late), "two more for each that lands late"
    in_time = [operation((1, 32), key="convolution")] * 3
    assert footprint(in_time, late=1) == footprint(sized(32, 32, 32)), "an operation that never is late"
    assert footprint(in_time[:1] + sized(32, 32), late=1) == footprint(sized(32, 32, 32), late=1), "one behind others"
    assert footprint(sized(32, 32)) == ([64, 64], [128, 128], 128, 256), "into the slot that the first one is done with"
    # slots of 64 bytes make way for larger ones, one by one
    assert footprint(sized(32, 64)) == footprint(sized(64, 32)) == ([128, 128], [256, 256], 256, 512)
    assert footprint(sized(32, 64), ranks=2) == ([128, 128], [256], 256, 256)
    assert footprint(sized(32, 64), cast=True) == ([128] * 3, [256, 256], 384, 512)


def test_what_is_ahead_takes_its_bytes_and_no_more():
    """Layers of R shards of 64 bytes: the look-ahead comes on top of the slots in use, one at least."""
    for ranks in range(1, 17):
        layers = [operation((1, 32))] * 5
        for route, group in (("ring", 1), ("direct", 1), ("ring", 2), ("direct", 3), ("gather", 1)):
            ways = {"route": route, "group": min(group, ranks)}
            shards = ranks if route == "gather" else min(group, ranks)
            lean = sum(footprint(layers, ranks, **ways)[0])
            for shards_ahead in (1, 2, 5, 20):
                held = sum(footprint(layers, ranks, look_ahead=64 * shards_ahead, **ways)[0])
                ahead = shards_ahead // shards * shards
                assert lean <= held <= max(lean, 64 * (2 * shards + shards_ahead)), (ranks, ways, shards_ahead)
                most = 9 * ranks if route == "gather" or group > 1 else 9 * (ranks - 1)
                if ranks > 1 and route != "ring" and group == 1 and ahead <= most:
                    assert held >= 64 * ahead, (ranks, ways, shards_ahead)
                if ranks == 1:
                    assert held == lean


def test_an_operation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one parameter"):
        footprint([operation()])


def test_waves_of_tiles():
    for sms in (1, 7, 132):
        for rows, columns in ((1, 1), (128, 256), (129, 256), (4096, 4097)):
            for index, (tall, wide) in enumerate(_native.GEMM_TILES):
                expected = math.ceil(rows / tall) * math.ceil(columns / wide) / sms
                assert _native.waves(rows, columns, sms, index) == expected
                assert (
                    _native.waves(rows, columns, sms, index, 3)
                    == 3 * math.ceil(rows / tall) * math.ceil(columns / wide) / sms
                )
            expected = _native.waves(rows, columns, sms)
            assert _native.wave_efficiency(rows, columns, sms) == expected / math.ceil(expected)
    assert _native.wave_efficiency(0, 4, 132) == _native.wave_efficiency(3, 4, 0) == 1.0
    with pytest.raises(ValueError, match="expected a tile below 2, got 2"):
        _native.waves(1, 1, 1, 2)
