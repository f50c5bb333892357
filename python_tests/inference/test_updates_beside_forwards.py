"""Updates of weights while other threads run forwards: each forward computes with old weights or with new ones; and
updates that are interrupted, or fail on one rank."""

import copy
import threading
import time

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_ranks
from models import make_model
from pretended_hosts import pretend_hosts
from torch import nn

import rtp_ext

UPDATES = 8
LAYERS = 4
TIMEOUT = 3.0


class Layer(nn.Linear):
    """Multiplies by one number, and takes a moment."""

    def __init__(self) -> None:
        super().__init__(6, 6, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.weight.copy_(torch.eye(6))


class Moment(nn.Module):
    def forward(self, x):
        time.sleep(0.002)
        return x


def layers() -> nn.Module:
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (Layer(), Moment())))


def version(number: int):
    """Weights with which the model multiplies by number ** LAYERS; a mixture gives another product."""
    for layer in range(LAYERS):
        yield f"{2 * layer}.weight", number * torch.eye(6, dtype=torch.float64)


def updates_beside_forwards(rank, ranks, transport, guarded):
    """Returns the factors that forwards have multiplied by."""
    if transport == "shm+tcp":
        pretend_hosts(rank, ranks // 2)
    model = rtp_ext.rotate_for_inference(layers(), transport=transport, timeout=30.0)
    ring, found, problems, ended = rtp_ext.ring_of(model), set(), [], threading.Event()
    if not guarded:
        ring.agreement.gate.close = lambda timeout: None

    def forwards():
        x = torch.ones(2, 6, dtype=torch.float64)
        with torch.inference_mode():
            while not ended.is_set():
                try:
                    found.update(model(x).flatten().tolist())
                except Exception as error:
                    problems.append(repr(error))
                    return

    threads = [threading.Thread(target=forwards) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(2, 2 + UPDATES):
            time.sleep(0.02 * (rank + 1) / ranks)
            source = dict(version(number))
            if number % 2:
                source = layers()
                source.load_state_dict(dict(version(number)))
            rtp_ext.update_weights(model, source if number % 2 else source.items())
        time.sleep(0.05)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not problems, problems
    ring.exchange("no rank pulls any more")
    ring.close()
    return found


@pytest.mark.parametrize(("ranks", "transport"), [(2, "shm"), (2, "tcp"), (4, "shm+tcp")])
def test_a_forward_has_old_weights_or_new_ones(ranks, transport):
    versions = {float(number) ** LAYERS for number in range(1, 2 + UPDATES)}
    for found in run_ranks(updates_beside_forwards, ranks, transport, True):
        assert found <= versions, f"mixtures: {sorted(found - versions)}"
        assert len(found) > 2, "control: forwards ran between updates"
    if transport != "shm+tcp":
        mixed = run_ranks(updates_beside_forwards, ranks, transport, False)
        assert any(found - versions for found in mixed), "control: without the gate there are mixtures"


def within_and_left(rank, ranks):
    """Updates within a forward, forwards within an update, and forwards that a thread has left."""
    model = rtp_ext.rotate_for_inference(layers(), timeout=TIMEOUT)
    ring, x = rtp_ext.ring_of(model), torch.ones(1, 6, dtype=torch.float64)
    refused = []

    def update(*_):
        with pytest.raises(ValueError, match="between forwards, got one within" if rank == 0 else "failed on rank 0"):
            rtp_ext.update_weights(model, version(2))
        refused.append(True)

    if rank == 0:
        handle = model[1].register_forward_hook(update)
        model(x)
        handle.remove()
    else:
        update()
    assert refused == [True]

    def running(call):
        yield from version(3)
        call()

    with pytest.raises(rtp_ext.RotationError, match="a forward within update_weights"):
        rtp_ext.update_weights(model, running(lambda: model(x)))
    with pytest.raises(rtp_ext.RotationError, match="an update within update_weights"):
        rtp_ext.update_weights(model, running(lambda: rtp_ext.update_weights(model, version(1))))
    with pytest.raises(rtp_ext.RotationError, match="partly new, update_weights again"):
        model(x)

    def leaves():  # SystemExit and KeyboardInterrupt run no hook
        handle = model[1].register_forward_hook(lambda *_: exit())
        try:
            model(x)
        finally:
            handle.remove()

    thread = threading.Thread(target=leaves)
    rtp_ext.update_weights(model, version(1))
    thread.start()
    thread.join()
    rtp_ext.update_weights(model, version(4))
    assert model(x)[0, 0] == 4.0**LAYERS
    # a forward that does not end is an error on every rank, in time
    entered, over = threading.Event(), threading.Event()

    def stays(*_):
        entered.set()
        over.wait()

    model[1].register_forward_hook(stays)
    thread = threading.Thread(target=model, args=(x,))
    if rank == 0:
        thread.start()
        entered.wait()
    start = time.monotonic()
    with pytest.raises(rtp_ext.RingTimeout, match="a forward of this rank did not end" if rank == 0 else "exchange"):
        rtp_ext.update_weights(model, version(5))
    assert time.monotonic() - start < TIMEOUT + 5.0
    over.set()
    assert not ring.alive
    if rank == 0:
        thread.join()


def test_updates_within_forwards_and_forwards_that_do_not_end():
    run_ranks(within_and_left, 2)


def interrupted(rank, ranks, stop):
    """Rank 0 is interrupted half-way: every rank gets an error, and no ring goes on."""
    model = rtp_ext.rotate_for_inference(make_model(), transport="tcp", timeout=30.0)
    ring = rtp_ext.ring_of(model)

    def values():
        for number, (name, value) in enumerate(make_model().named_parameters()):
            if rank == 0 and number == 2:
                raise stop
            yield name, value

    start = time.monotonic()
    with pytest.raises(stop if rank == 0 else rtp_ext.RingTimeout, match=None if rank == 0 else "global rank 0"):
        rtp_ext.update_weights(model, values())
    assert time.monotonic() - start < 5.0 and not ring.alive
    with pytest.raises(rtp_ext.RotationError, match="the ring cannot be used any more"):
        model(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(rtp_ext.RotationError, match="the ring cannot be used any more"):
        rtp_ext.update_weights(model, values())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_update_ends_the_ring(stop):
    run_ranks(interrupted, 2, stop)


@on_ranks(2)
@pytest.mark.parametrize("streams", [False, True])
def test_an_error_on_one_rank_is_one_on_all_in_time(rank, streams):
    """An error of any kind on one rank, in the middle of a tensor that travels, is an error on all within the timeout,
    whatever that of the group of the source is."""
    plain = make_model()
    timeouts = (TIMEOUT, 30.0) if streams else (30.0, TIMEOUT)  # of the ring that broadcasts, and of the other one
    training = rtp_ext.fully_rotate(copy.deepcopy(plain), bundle=False, timeout=timeouts[0])
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=timeouts[1])
    if rank == 1:
        broadcast, calls = dist.broadcast, []

        def failing(*arguments, **keywords):
            calls.append(1)
            if len(calls) == 3:
                raise OSError("planted")
            return broadcast(*arguments, **keywords)

        dist.broadcast = failing
    start = time.monotonic()
    source = rtp_ext.stream_weights(training) if streams else training
    with pytest.raises(OSError if rank == 1 else rtp_ext.RingTimeout, match="planted"):
        rtp_ext.update_weights(model, source)
    assert time.monotonic() - start < TIMEOUT + 5.0, "far below the other timeouts"
