"""Traces: every step is recorded once and in order, waiting is seen where hops are slow, and the files are drawn."""

import contextlib
import dataclasses
import io
import json
import math
import re
import time
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace

import overlap
import pytest
import simulated_cuda
import torch
from harness import Cases, run_ranks
from reference import random
from shared import overlap_options, recording
from shared.launch import Place
from simulated_cuda import run_threads, skip_without_headers, values
from torch import nn
from trace_checks import check_arrivals, check_trace, from_raw, steps_of

import rtp_ext
from rtp_ext import _native, timeline, trace
from rtp_ext.functional import Prepared, rotated_linear
from rtp_ext.ring.telemetry import Trace, TraceEvent, TracePass

MS = 1e-3


def model_of(ring, layers=3, features=16):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(features, features) for _ in range(layers)))
    return rtp_ext.fully_rotate(model, mesh=ring, bundle=False)


def step(model, features=16):
    model(torch.ones(4, features, requires_grad=True)).square().sum().backward()


# -- figures of made-up traces -----------------------------------------------------------------------------------------


def made_up(ranks, compute, hop, **options):
    """Traces of one pass that ran exactly as its timeline says."""
    options = {"pass_": "forward", "route": "ring", **options}
    schedules = [_native.make_schedule(ranks, rank, **options) for rank in range(ranks)]
    traces = []
    for rank in range(ranks):
        own = [e for e in timeline.timeline(schedules, compute_time=compute, hop_time=hop) if e.rank == rank]
        events = [TraceEvent(rank, e.lane, e.label, e.start, e.end, e.step, 0, "made up", "step", e.start) for e in own]
        computes = sorted((e for e in events if e.lane == "compute"), key=lambda e: e.start)
        for before, after in pairwise(computes):
            if after.start > before.end:
                wait = dataclasses.replace(after, start=before.end, end=after.start, kind="wait", label="wait")
                events.append(wait)
        end = max(e.end for e in own)
        passes = [TracePass(0, "made up", options, 0.0, end)]
        traces.append(Trace(rank, ranks, "cpu", "made up", "here", 0.0, 0, passes, events))
    return schedules, traces


@pytest.mark.parametrize(("compute", "hop"), [(1.0, 0.5), (1.0, 1.5)])
def test_a_prediction_from_times_that_were_predicted_is_the_same(compute, hop):
    for options in ({}, {"pass_": "backward"}, {"pass_": "backward", "halves": True}, {"route": "direct"}):
        schedules, traces = made_up(4, compute, hop, **options)
        predicted = timeline.timeline(schedules, compute_time=compute, hop_time=hop)
        found = trace.predict(traces, 0)
        assert [(e.rank, e.step) for e in found] == [(e.rank, e.step) for e in predicted]
        assert [e.start for e in found] == pytest.approx([e.start for e in predicted])
        assert [e.end for e in found] == pytest.approx([e.end for e in predicted])
        for each in traces:
            check_trace(each)
        check_arrivals(traces)
    with pytest.raises(ValueError, match=r"number of a pass that all ranks recorded, got 3 of \[1, 1, 1, 1\]"):
        trace.predict(traces, 3)


def test_figures():
    (found, *_) = trace.summaries(made_up(4, 1.0, 0.5)[1])
    assert (found.total, found.compute, found.waiting, found.hops, found.hidden) == (
        4,
        4,
        0,
        {"weight": 1.5, "gradient": 0},
        1,
    )
    (found, *_) = trace.summaries(made_up(4, 1.0, 1.5)[1])
    assert found.hops["weight"] == pytest.approx(4.5) and found.waiting == pytest.approx(1.5)
    assert found.hidden == pytest.approx(1 - 1.5 / 4.5) and found.total == pytest.approx(5.5)
    alone = trace.summaries(made_up(1, 1.0, 1.5)[1])[0]
    assert alone.hidden is None and alone.waiting == 0
    text = trace.report(made_up(4, 1.0, 1.5)[1]).splitlines()
    assert text[0].split()[2:] == ["passes", "total", "compute", "waiting", "w", "hops", "g", "hops", "hidden"]
    assert text[1].split() == ["made", "up", "1", "5500.000", "4000.000", "1500.000", "4500.000", "0.000", "67%"]


def test_ranks_are_aligned_by_the_clock_of_their_host():
    traces = made_up(2, 1.0, 0.5)[1]
    traces = [dataclasses.replace(each, zero=100.0 + 7 * each.rank) for each in traces]

    for other, moved in ((traces[1], 7.0), (dataclasses.replace(traces[1], host="elsewhere"), 0.0)):
        told = [traces[0], other]
        ring = SimpleNamespace(mesh="of two", exchange=lambda mine, told=told: told)
        first, second = trace.gather(ring, traces[0])
        assert first == traces[0] and second.passes[0].start == moved
        assert [e.end - moved for e in second.events] == pytest.approx([e.end for e in traces[1].events])


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulated():
    """A ring of four in one process, and the trace of one step of three layers that were warmed up."""
    ring = rtp_ext.Ring.emulated(4, buffers="lean")
    model = model_of(ring)
    for _ in range(2):
        step(model)
    sent = ring.prefetched()[1]
    with ring.trace() as recorded:
        step(model)
    return ring, model, recorded, ring.prefetched()[1] - sent


def test_every_step_of_a_model_is_recorded_once(emulated):
    _, _, recorded, ahead = emulated
    order = ["0 forward", "1 forward", "2 forward", "2 backward", "1 backward", "0 backward"]
    assert [each.operation for each in recorded.passes] == order
    check_trace(recorded)
    early = [
        each.number
        for each in recorded.passes
        if any(e.lane == "weight" and e.end < each.start for e in steps_of(recorded, each.number))
    ]
    assert ahead == 4 and early == [1, 2, 4, 5], "the first hop of every layer but the first of a phase is sent ahead"
    assert all(e.pass_ >= 0 for e in recorded.events)


def broken(recorded, change):
    events = list(recorded.events)
    change(events)
    return dataclasses.replace(recorded, events=events)


def test_control_a_wrong_trace_is_refused(emulated):
    recorded = emulated[2]
    hops = [i for i, e in enumerate(recorded.events) if e.lane == "weight" and e.kind == "step"]
    computes = [i for i, e in enumerate(recorded.events) if e.lane == "compute" and e.kind == "step"]

    def late(events):  # a hop that arrives after its compute has begun
        events[hops[1]] = dataclasses.replace(events[hops[1]], end=recorded.passes[0].end)

    def wide(events):
        events[computes[0]] = dataclasses.replace(events[computes[0]], end=events[computes[1]].start + MS)

    for change in (late, wide, lambda e: e.pop(hops[0]), lambda e: e.append(e[computes[0]])):
        with pytest.raises(AssertionError):
            check_trace(broken(recorded, change))


def test_nothing_is_recorded_when_it_is_off(emulated):
    ring, model, *_ = emulated
    step(model)
    assert ring.communicator.executor.read_trace()[2:] == ([], [])
    with ring.trace() as outer:
        with pytest.raises(ValueError, match="not being recorded"), ring.trace():
            pass
        step(model)
    assert len(outer.passes) == 6
    with pytest.raises(KeyError), ring.trace() as left:
        step(model)
        raise KeyError("of the block")
    assert len(left.passes) == 6 and ring.communicator.executor.read_trace()[2:] == ([], [])


def test_slow_hops_are_seen_as_waiting_with_their_cause(emulated):
    ring, model, *_ = emulated
    totals, causes = [], []
    for most in (0, 20):
        ring.communicator.executor.set_delay(timedelta(milliseconds=most))
        start = time.perf_counter()
        with ring.trace() as recorded:
            step(model)
        wall = time.perf_counter() - start
        check_trace(recorded)
        found = trace.summaries([recorded])
        totals.append(sum(each.waiting for each in found))
        # no compute hides a copy that the host makes
        assert all(each.hidden == pytest.approx(0, abs=1e-6) for each in found)
        causes.append(trace.causes(recorded))
        assert set(causes[-1]) == set(trace.CAUSES) and 0 < sum(causes[-1].values()) <= wall, "no event counts twice"
        posted = [e for e in recorded.events if e.label.startswith("post ")]
        assert len(posted) == sum(e.lane in ("weight", "gradient") for e in recorded.events)
    ring.communicator.executor.set_delay(timedelta())
    # 27 hops of 10 ms on average, which the host makes while it posts them
    assert totals[1] > totals[0] + 40 * MS
    quick, slow = (each.pop("posting") for each in causes)
    assert slow > quick + 40 * MS and max(sum(each.values()) for each in causes) < 40 * MS


def test_quantized_travel_shows_conversions_and_slots():
    ring = rtp_ext.Ring.emulated(4, buffers="lean", travel="int8", gradient_route="direct", gradient_travel="int8")
    model = model_of(ring, layers=2)
    with ring.trace() as recorded:
        step(model)
    check_trace(recorded)
    staged = [e.label for e in recorded.events if e.kind == "stage"]
    assert (staged.count("dequantize"), staged.count("round")) == (2 * 2 * 4, 2 * 3), "shards; what leaves"
    assert len(staged) == 2 * 2 * 4 + 2 * 3 + 2 * 2, "and the copies that the owner rounds, in forward and backward"
    slots = [e for e in recorded.events if e.kind == "wait" and e.label.startswith("slot: ")]
    assert len(slots) >= 4 and trace.causes(recorded)["conversions"] > 0, "each copy waits for its slot"


def test_casts_and_pieces_and_lanes_of_a_ring_of_two():
    ring = rtp_ext.Ring.emulated(2, buffers="lean", gradient_halves=True)
    ring.slot_cap = 96  # three rows of a gradient
    x = random(3, 8, dtype=torch.bfloat16, seed=1).requires_grad_()
    weight = random(10, 8, dtype=torch.float32, seed=2).requires_grad_()
    options = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    with ring.trace() as recorded:
        rotated_linear(x, weight, ring=ring, **options).sum().backward()
    check_trace(recorded)
    staged = {e.pass_ for e in recorded.events if e.kind == "stage"}
    assert len(recorded.passes) > 2 and staged == {each.number for each in recorded.passes}
    assert any(each.options["halves"] for each in recorded.passes)


# -- ranks -------------------------------------------------------------------------------------------------------------


def _ranks(rank, ranks):
    cases, found = Cases(), {}
    for transport, route, in_place, buffers in (
        ("shm", "ring", False, "lean"),
        ("shm", "direct", False, "auto"),
        ("tcp", "ring", False, "lean"),
        ("c10d", "ring", True, "auto"),
    ):
        ring = rtp_ext.Ring(transport=transport, route=route, timeout=60.0, buffers=buffers)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        model = rtp_ext.fully_rotate(model, mesh=ring, bundle=False, in_place=in_place)
        for _ in range(2):
            step(model)
        sent = ring.prefetched()[1]
        with ring.trace() as recorded:
            step(model)
        with cases.case(f"{transport} {route}"):
            check_trace(recorded, ahead=buffers == "auto" and not in_place)
            ahead = sum(
                e.lane == "weight" and e.posted < each.start
                for each in recorded.passes
                for e in steps_of(recorded, each.number)
            )
            assert ahead == ring.prefetched()[1] - sent and (ahead > 0) == (not in_place)
            assert check_arrivals(trace.gather(ring, recorded)) > 10
        ring.close()

    ring = rtp_ext.Ring(transport="shm", timeout=60.0)
    shard, prepared = torch.ones(64), Prepared()
    list(ring.rotate(shard, prepared=prepared))  # the ranks agree on its shape
    shapes = {"hidden": 0.2, "exposed": 0.0}
    for name, pause in shapes.items():
        ring.communicator.executor.set_delay(timedelta(milliseconds=60 if name == "exposed" and rank == 0 else 0))
        with ring.trace() as recorded:
            if name == "hidden" and rank == 0:
                time.sleep(0.15)  # its neighbour's first hop is under way that long
            for _ in range(1 if name == "hidden" else 4):
                for _owner, _view in ring.rotate(shard, prepared=prepared):
                    time.sleep(pause)
        traces = trace.gather(ring, recorded)
        with cases.case(name):
            check_trace(recorded)
        found[name] = trace.summaries(traces)
    found["traces"] = traces
    ring.close()
    cases.finish()
    return found


def test_three_ranks():
    hidden, exposed, traces = run_ranks(_ranks, 3)[0].values()
    for each in hidden:  # 600 ms of pauses
        assert each.compute > 0.5 and each.waiting < each.compute, each
    assert hidden[1].rank == 1 and hidden[1].hidden > 0.5 and hidden[1].hops["weight"] > 0.05, hidden[1]
    waiting = [sum(each.waiting for each in exposed if each.rank == rank) for rank in range(3)]
    # rank 0 holds 8 hops up by 30 ms on average; its neighbour waits for them, and rank 0 itself posts that long
    assert min(waiting) > 30 * MS, waiting
    longest = max(event.end - event.start for event in traces[1].events if event.lane == "weight")
    predicted = trace.predict(traces, 0)
    assert {event.rank for event in predicted} == {0, 1, 2} and longest > 10 * MS


# -- files -------------------------------------------------------------------------------------------------------------


def test_chrome(emulated, tmp_path):
    recorded = emulated[2]
    path = tmp_path / "trace.json"
    trace.write_chrome(path, [recorded])
    read = json.loads(path.read_text())
    assert read["displayTimeUnit"] == "ms" and read["otherData"]["transport"] == "emulated"
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in read["traceEvents"] if e["name"] == "thread_name"}
    assert list(named.values()) == ["pass", "compute", "side", "weight", "gradient"]
    spans = [e for e in read["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(recorded.events) + len(recorded.passes)
    for event in spans:
        assert {"name", "cat", "pid", "tid", "ts", "dur", "args"} <= set(event) and event["dur"] >= 0
    drawn = {(named[e["pid"], e["tid"]], e["name"], e["ts"]) for e in spans}
    assert {(e.lane, e.label, e.start * 1e6) for e in recorded.events} <= drawn


def captions(path):
    return re.findall("<!-- (.*?) -->", path.read_text(), re.DOTALL)


def test_plot(emulated, tmp_path):
    recorded = emulated[2]
    trace.plot(tmp_path / "trace.png", [recorded])
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    trace.plot(tmp_path / "some.svg", [recorded], passes=[1, 3], title="a title")
    found = captions(tmp_path / "some.svg")
    titles = [text for text in found if text.startswith("pass ")]
    assert [text.split(",")[0] for text in titles] == ["pass 1: 1 forward", "pass 3: 2 backward"]
    assert {"predicted", "measured", "waiting for a hop", "of another pass", "a title"} <= set(found)
    assert [trace.kind_of(each) for each in ("a.0.b1 forward", "12 backward")] == ["a.*.b1 forward", "* backward"]
    assert len(trace.most_exposed([recorded], 0)) == 2
    traces = made_up(4, 1.0, 1.5)[1]
    trace.plot(tmp_path / "made.svg", traces, rank=2)
    (title,) = [text for text in captions(tmp_path / "made.svg") if text.startswith("pass ")]
    assert title.startswith(
        "pass 0: made up, predicted 5.5e+03 ms, measured 5.5e+03 ms; waiting for hops 1.5e+03 ms; 67%"
    )
    with pytest.raises(ValueError, match=r"one of the ranks \[0, 1, 2, 3\], got 4"):
        trace.plot(tmp_path / "no.png", traces, rank=4)
    with pytest.raises(ValueError, match="at least one pass"):
        trace.plot(tmp_path / "no.png", [dataclasses.replace(recorded, passes=[], events=[])])


def test_files_of_the_option(tmp_path):
    assert [each.name for each in recording.files(tmp_path / "a.b")] == ["a.b.json", "a.b.png"]
    assert [each.name for each in recording.files(tmp_path / "a.svg", "x/T4 R2 ")] == ["a-x-T4-R2.svg"]


def test_the_benchmark_of_overlap_records(tmp_path):
    tiny = ["--device", "cpu", "--ring", "emulated", "--shapes", "cpu-tiny", "--tokens", "16", "--ranks", "4"]
    quick = ["--seconds", "0", "--iterations", "1", "--directions", "backward,step", "--output", str(tmp_path / "out")]
    args = overlap_options.parse_arguments([*tiny, *quick, "--trace", str(tmp_path / "trace")])
    with contextlib.redirect_stdout(io.StringIO()) as told:
        overlap.run_cases(Place(0, 1, torch.device("cpu"), None), args)
    stems = [f"trace-cpu-tiny-T16-R4-{direction}" for direction in ("backward", "step")]
    made = sorted(path.name for path in tmp_path.glob("trace*"))
    assert made == sorted(f"{stem}.{suffix}" for stem in stems for suffix in ("json", "png"))
    spans = [
        e for e in json.loads((tmp_path / f"{stems[1]}.json").read_text())["traceEvents"] if e.get("cat") == "pass"
    ]
    assert [e["name"] for e in spans] == ["rotated_linear forward", "rotated_linear backward"]
    assert "operation (ms)" in told.getvalue()


# -- the simulated CUDA runtime ----------------------------------------------------------------------------------------


def _simulated(rank, sim, ids, ranks):
    executor = _native.Executor(
        sim.nccl(ids, rank, ranks, timedelta(seconds=20), None), rank, ranks, torch.device("cpu")
    )
    shapes = [[[4, 4]] * ranks]
    local, total = torch.full((4, 4), float(rank), dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    sim.set_compute(True)
    try:
        for recorded in (False, True):
            if recorded:
                executor.set_delay(timedelta(milliseconds=300))
                executor.trace(True)
            for reverse in (False, True):
                execution = _native.Execution.rotate(executor, [local], shapes, "ring", reverse)
                while execution.next() is not None:
                    sim.launch_add(total, execution.weight()[0])
                execution.finish()
        executor.trace(False)
        raw = executor.read_trace()  # waits for all enqueued work
        sim.synchronize()
    finally:
        sim.set_compute(False)
    executor.close()
    return from_raw(raw, rank, ranks)


def test_events_of_cuda_streams():
    skip_without_headers()
    sim = simulated_cuda.load()
    sim.reset(3)
    ids = [sim.unique_id() for _ in range(2)]
    traces = values(run_threads(_simulated, 3, sim, ids, 3))
    for each in traces:
        assert len(each.passes) == 2
        # Threads stand for streams. By the times at which the host enqueues them, computes would come 150 ms too early.
        check_trace(each, tolerance=0.1)
        hops = [e for e in each.events if e.lane == "weight"]
        assert len(hops) == 4 and all(e.end > e.start for e in hops)
        assert any(e.kind == "wait" and e.end - e.start > 5e-3 for e in each.events)
        assert not any(math.isnan(each.end) for each in each.passes)
    assert simulated_cuda.settled(sim) and sim.mistakes() == []
