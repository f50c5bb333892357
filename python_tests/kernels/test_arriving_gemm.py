"""The kernel that follows the hops of a pass: its protocol for every order in which up to four shards arrive, with the
mistakes that must be noticed, and the kernel's own source on emulated threads while shards arrive."""

import ctypes
import itertools
from ctypes import Structure, byref, c_int, c_int32, c_int64, c_uint8, c_uint32, c_void_p

import numpy as np
import pytest
from compiled import compiler
from emulated_kernels import load
from kernel_arrays import ELEMENTS, decode, encode
from kernel_emulation import build
from kernel_emulation.mutants import ARRIVALS_MUTANTS

POSITIONS, PRODUCTS, TILE = 32, 48, 128

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on PATH")


class Case(Structure):
    _fields_ = [
        *((name, c_int) for name in ("mutant", "positions", "slots", "sums", "tiles", "blocks", "together")),
        *((name, c_int) for name in ("torn", "seed")),
        ("order", c_int * POSITIONS),
    ]


class Product(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("left", "weight", "bias", "out")),
        *((name, c_int32) for name in ("left_stride", "weight_stride", "out_stride", "rows", "columns", "inner")),
        *((name, c_int32) for name in ("position", "turn", "counter")),
        ("adds", c_uint8),
    ]


class Arrivals(Structure):
    _fields_ = [
        ("positions", c_int), ("in_order", c_uint8), ("waits", c_uint32), ("frees", c_uint32), ("blocks", c_uint32),
        ("tiles", c_int * POSITIONS), ("words", c_void_p), ("counters", c_void_p),
    ]  # fmt: skip


class Gemm(Structure):
    _fields_ = [
        ("type", c_int32), ("sums", c_uint8), ("products", c_int32), ("arrivals", Arrivals), ("turns", c_void_p),
        ("product", Product * PRODUCTS),
    ]  # fmt: skip


class Feed(Structure):
    _fields_ = [("to", c_void_p), ("from_", c_void_p), ("bytes", c_int64), ("position", c_int64), ("after", c_int64)]


COUNTERS = 2 * POSITIONS + 1


@pytest.fixture(scope="module")
def library():
    found = load(build())
    found.arrivals_problem.restype = ctypes.c_char_p
    sizes = [ctypes.sizeof(each) for each in (Gemm, Product, Arrivals, Case)] + [4 * COUNTERS]
    assert [found.arriving_bytes(which) for which in range(len(sizes))] == sizes
    return found


def problem(library, order, *, positions, mutant=0, slots=4, sums=0, tiles=3, blocks=3, together=2, torn=0, seed=1):
    """What goes wrong where positions arrive in this order, the others being there at first; None: nothing."""
    case = Case(mutant, positions, slots, sums, tiles, blocks, together, torn, seed)
    case.order[:] = [*order, *[-1] * (POSITIONS - len(order))]
    found = library.arrivals_problem(byref(case))
    return found and found.decode()


def test_every_order_of_arrival_ends_with_every_tile_made_once(library):
    """More tiles than blocks, more blocks than run at once, slots that are used again; all words are 0 afterwards."""
    seen = 0
    for positions in (1, 2, 3, 4):
        for at_home in (0, 1):  # the rank's own shard is there, or arrives as the others do
            for order in itertools.permutations(range(at_home, positions)):
                for slots, sums, together in ((1, 0, 1), (2, 0, 3), (positions, 1, 1), (positions, 1, 3)):
                    shape = {"positions": positions, "slots": slots, "sums": sums, "together": together}
                    for tiles, seed in ((1, 0), (3, 1), (3, 2), (4, 3)):
                        found = problem(library, order, tiles=tiles, seed=100 * seen + seed, **shape)
                        assert found is None, (order, shape, tiles, seed, found)
                    seen += 1
    # the schedule's order, with the two slots that a pass has: sums take shards in that order
    for together, seed in itertools.product((1, 2, 4), range(5)):
        assert problem(library, range(1, 8), positions=8, slots=2, sums=1, together=together, seed=seed) is None
    assert seen == 4 * (1 + 1 + 2 + 1 + 6 + 2 + 24 + 6)


@pytest.mark.parametrize("mutant", [*ARRIVALS_MUTANTS, "counts twice"])
def test_a_mistake_in_the_protocol_is_noticed(library, mutant):
    number = [*ARRIVALS_MUTANTS].index(mutant) + 1 if mutant in ARRIVALS_MUTANTS else 0
    for seed in range(20):
        for order, slots, sums, together in (((3, 2, 1), 2, 0, 1), ((1, 2, 3), 2, 0, 3), ((1, 2, 3), 3, 1, 3)):
            more = {"mutant": number, "torn": int(number == 0), "tiles": 2, "seed": seed}
            if problem(library, order, positions=4, slots=slots, sums=sums, together=together, **more):
                return
    raise AssertionError(f"not noticed: {mutant}")


class Memory:
    """Matrices of a 16-bit type whose rows start at multiples of 16 bytes, and float32 sums."""

    def __init__(self, element):
        self.element, self.kept = element, []

    def aligned(self, count):
        room = np.zeros(count * 2 + 16, np.uint8)
        start = -room.ctypes.data % 16
        self.kept.append(room)
        return room[start : start + count * 2].view(np.uint16)

    def matrix(self, values):
        rows, columns = values.shape
        stride = -(-columns // 8) * 8 + 8
        cells = self.aligned(rows * stride).reshape(rows, stride)
        cells[:] = 0x7FFF  # NaNs, which must not be read
        cells[:, :columns] = encode(values, self.element)
        return cells


def run(library, rng, element, order, slots, sums, *, rows, shards, inner, together=1, blocks=3, blind=False):
    """A pass with shards of `shards` rows: what the kernel made, what float64 makes, and a bound of the error."""
    memory, positions = Memory(element), len(shards)
    numbers = lambda *shape: decode(encode(rng.standard_normal(shape), element), element)  # noqa: E731
    whole = sum(shards)
    left = numbers(rows, whole if sums else inner)
    weights = [numbers(shard, inner) for shard in shards]
    biases = [numbers(1, shard) for shard in shards]
    starts = [sum(shards[:position]) for position in range(positions)]
    x = memory.matrix(left)
    if sums:  # every shard's part of the left operand starts at a multiple of 16 bytes
        assert all(start % 8 == 0 for start in starts)
        out = np.full((rows, inner), np.nan, np.float32)
        expected = left @ np.concatenate(weights)
        error = np.abs(left) @ np.abs(np.concatenate(weights)) * 2.0**-20
    else:
        out = memory.aligned(rows * (whole + 3)).reshape(rows, whole + 3)
        out[:] = 0x7F7F
        expected = np.concatenate([left @ w.T + b for w, b in zip(weights, biases, strict=True)], 1)
        error = (
            np.abs(expected) * 2.0 ** (-8 if element == "bfloat16" else -10)
            + np.abs(left) @ np.abs(np.concatenate(weights)).T * 2.0**-20
        )

    # a slot holds a shard's weight and then its bias; what is not fed is there from the start
    packed = [memory.matrix(w) for w in weights]
    stride = packed[0].shape[1]
    most = max(shards) * stride + max(shards) + 8
    room = [memory.aligned(most) for _ in range(slots)]
    sources, homes, feeds = [], [], []
    words = np.zeros(2 * POSITIONS, np.uint64)
    waits = frees = 0
    for position in range(positions):
        source = memory.aligned(most)
        source[: packed[position].size] = packed[position].ravel()
        source[-shards[position] :] = encode(biases[position], element).ravel()
        sources.append(source)
        homes.append(source)
    for number, position in enumerate(order):
        homes[position] = room[number % slots]
        waits |= 1 << position
        before = order[number - slots] if number >= slots else -1
        frees |= 1 << before if before >= 0 else 0
        source = sources[position]
        feeds.append(Feed(homes[position].ctypes.data, source.ctypes.data, source.nbytes, position, before))
    gemm = Gemm(ELEMENTS.index(element), sums, positions)
    tile = lambda size: -(-size // TILE)  # noqa: E731
    sum_tiles = tile(rows) * tile(inner)
    counters = np.zeros(COUNTERS + sum_tiles, np.uint32)
    gemm.arrivals = Arrivals(positions, sums, waits, frees, 0)
    gemm.arrivals.words, gemm.arrivals.counters = words.ctypes.data, counters.ctypes.data
    gemm.turns = counters.ctypes.data + 4 * COUNTERS
    for position, shard in enumerate(shards):
        home, start = homes[position], starts[position]
        columns = inner if sums else shard
        gemm.arrivals.tiles[position] = tile(rows) * tile(columns)
        bias = None if sums else home.ctypes.data + 2 * (most - shard)
        gemm.product[position] = Product(
            x.ctypes.data + (2 * start if sums else 0), home.ctypes.data, bias,
            out.ctypes.data + (0 if sums else 2 * start), x.shape[1], stride, out.shape[1],
            rows, columns, shard if sums else inner, position, position, 0, position > 0,
        )  # fmt: skip
    made = library.arriving_gemm(
        byref(gemm), blocks, together, (Feed * len(feeds))(*feeds), len(feeds), 100 if together > 1 else 0, int(blind)
    )
    assert made == 0, library.message().decode()
    assert not words.any() or blind
    if sums:
        return out.astype(np.float64), expected, error
    assert (out[:, whole:] == 0x7F7F).all(), "columns beside the output were written"
    return decode(np.ascontiguousarray(out[:, :whole]), element), expected, error


def test_the_kernel_gives_what_float64_gives(library):
    """In whatever order shards arrive, in slots of their own and in slots that are used again."""
    rng = np.random.default_rng(0)
    cases = [
        ("bfloat16", (1, 2), 2, False, {"rows": 5, "shards": (8, 16, 3), "inner": 40}),
        ("float16", (2, 1), 1, False, {"rows": 130, "shards": (24, 130, 9), "inner": 17, "together": 3}),
        ("bfloat16", (3, 1, 2), 2, False, {"rows": 33, "shards": (9, 8, 1, 7), "inner": 70, "together": 2}),
        ("bfloat16", (1, 2), 2, True, {"rows": 7, "shards": (8, 16, 3), "inner": 150, "together": 3}),
        ("float16", (2, 1), 2, True, {"rows": 131, "shards": (40, 8, 33), "inner": 20}),
        ("bfloat16", (1, 2, 3), 1, True, {"rows": 20, "shards": (8, 8, 8, 5), "inner": 9, "together": 2}),
    ]
    for number, (element, order, slots, sums, shape) in enumerate(cases):
        library.set_backward(number % 2)
        made, expected, error = run(library, rng, element, order, slots, sums, **shape)
        assert (np.abs(made - expected) <= error).all(), (number, np.abs(made - expected).max())
        for axis in (0, 1):  # the control: a result one place aside does not pass
            assert not (np.abs(np.roll(made, 1, axis) - expected) <= error).all(), number


def test_sums_have_the_same_bits_in_whatever_order_shards_arrive(library):
    made = []
    for order in itertools.permutations((1, 2)):
        rng = np.random.default_rng(5)
        shape = {"rows": 9, "shards": (16, 8, 7), "inner": 24, "together": 3}
        made.append(run(library, rng, "bfloat16", order, 2, True, **shape)[0])
    assert np.array_equal(*made)


def test_a_kernel_that_reads_before_the_flag_is_noticed(library):
    """What has not arrived is NaN."""
    shape = {"rows": 5, "shards": (8, 16, 3), "inner": 40, "together": 2}
    made, expected, error = run(library, np.random.default_rng(0), "bfloat16", (1, 2), 2, False, blind=True, **shape)
    assert not (np.abs(made - expected) <= error).all()
