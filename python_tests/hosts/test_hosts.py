"""Hosts made of namespaces: their shared resources and their end; rings across them, and a host that dies."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from pathlib import Path

import compare
import host_ranks
import pytest
import torch
from models import make_model, mean_loss
from shared import compare_options
from shared.hosts import Hosts, Links, NoHosts, bits_per_second, lives, refusal
from shared.launch import launch

from rtp_ext.host import cores
from rtp_ext.ring.links.places import Place, describe

ROOT = Path(__file__).resolve().parents[2]
RUNNER = str(ROOT / "benchmarks" / "hosts.py")
RANKS = str(Path(host_ranks.__file__))
REFUSAL = refusal()
MARGIN = 6.0  # beyond the timeout, for the scheduler

needs_hosts = pytest.mark.skipif(REFUSAL is not None, reason=f"hosts cannot be made here: {REFUSAL}")


@pytest.fixture
def mark():
    """A mark in the environment of all that a test starts on hosts; at its end nothing with it is left."""
    token = f"rtp_test={uuid.uuid4()}"
    names = set(os.listdir("/sys/class/net"))
    yield dict([token.split("=")])
    deadline = time.monotonic() + 5.0
    while (left := marked(token)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == [], "processes outlive their hosts"
    assert not {"switch", "port0", "port1"} & (set(os.listdir("/sys/class/net")) - names)


def marked(token: str) -> list[str]:
    """The processes that have `token` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "environ").read_bytes():
                found.append(f"{folder.name}: {(folder / 'cmdline').read_bytes()!r}")
        except OSError:  # it has ended, or is another user's
            continue
    return found


def settings(mark: dict[str, str]) -> dict[str, str]:
    """The environment of `host_ranks.py`."""
    path = [str(ROOT), str(ROOT / "python_tests" / "support"), os.environ.get("PYTHONPATH", "")]
    return {**mark, "PYTHONPATH": os.pathsep.join(path)}


def said_in(host: Hosts, number: int, script: str) -> str:
    return (
        host.start(number, ["sh", "-c", script], stdout=subprocess.PIPE, text=True).communicate(timeout=20)[0].strip()
    )


@needs_hosts
def test_what_hosts_share_and_what_they_do_not(mark):
    with Hosts(Links(2, rate="50mbit", pin=cores() > 1)) as hosts:
        places = [os.readlink(f"/proc/{pid}/ns/{kind}") for pid in hosts._pids for kind in ("net", "pid", "uts", "ipc")]
        assert len(set(places)) == 8 and not set(places) & {
            os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")
        }
        assert said_in(hosts, 1, "hostname; getent hosts host0") == "host1\n10.78.0.1       host0"
        assert (
            said_in(hosts, 0, "echo mine > /dev/shm/file; ls /dev/shm; ls -d /proc/[0-9]* | head -1") == "file\n/proc/1"
        )
        assert said_in(hosts, 1, "ls /dev/shm") == "" and not Path("/dev/shm/file").exists()
        assert json.loads(said_in(hosts, 1, "echo $RTP_MADE_HOSTS"))["rate"] == "50mbit"
        if cores() > 1:
            shares = [said_in(hosts, host, "taskset -cp $$ | sed 's/.*: //'") for host in range(2)]
            assert shares[0] != shares[1]
        server = "import socket; s = socket.create_server(('', 7)); print(len(s.accept()[0].recv(4 << 20, 256)))"
        got = hosts.start(0, [sys.executable, "-S", "-c", server], stdout=subprocess.PIPE, text=True)
        client = "import socket, time\nwhile True:\n try: s = socket.create_connection(('host0', 7)); break\n"
        client += " except OSError: time.sleep(0.02)\ns.sendall(bytes(4 << 20))"
        before, start = hosts.sent(1), time.monotonic()
        assert hosts.start(1, [sys.executable, "-S", "-c", client]).wait(30) == 0
        assert got.communicate(timeout=20)[0].strip() == str(4 << 20)
        assert time.monotonic() - start > 8 * (3 << 20) / 50e6, "the first MiB goes at once"
        assert 4 << 20 <= hosts.sent(1) - before <= 1.1 * (4 << 20) and hosts.sent(0) < 1 << 20
        sleeping = hosts.start(0, ["sleep", "1000"], mark)
        failing = hosts.start(1, ["sh", "-c", "exit 7"], mark)
        assert hosts.wait([sleeping, failing], grace=0.1) == 7 and sleeping.returncode == -signal.SIGKILL
    assert not any(map(lives, hosts._pids))
    links = [os.readlink(file) for file in Path("/proc").glob("[0-9]*/ns/net") if os.access(file, os.R_OK)]
    assert not set(places) & set(links)


@needs_hosts
def test_nothing_outlives_whoever_made_the_hosts(mark):
    """Three sets of hosts at a time, which do not interfere: each ends in another way, while the others go on."""
    ends = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    command = [sys.executable, RUNNER, "--hosts", "2", "--", "-m", "http.server"]  # which does not end on its own
    ((key, value),) = mark.items()
    marks = [f"{value}-{how}" for how in map(int, ends)]  # those of the three are distinguished
    started = [
        subprocess.Popen(command, env={**os.environ, key: own}, stderr=subprocess.DEVNULL, start_new_session=True)
        for own in marks
    ]
    for own in marks:
        while len([each for each in marked(f"{key}={own}") if "torch.distributed.run" in each]) < 4:
            assert all(runner.poll() is None for runner in started)
            time.sleep(0.02)
    for number, (how, status) in enumerate(ends.items()):
        started[number].send_signal(how)
        assert started[number].wait(20) == status
        assert [runner.poll() for runner in started[number + 1 :]] == [None] * (len(ends) - number - 1)


@needs_hosts
@pytest.mark.parametrize(
    ("through", "path", "message"),
    [
        (["setpriv", "--reuid=65534", "--clear-groups"], None, "need root, this is user 65534"),
        (["setpriv", "--inh-caps=-all", "--bounding-set=-all"], None, "not permitted here, as in most containers"),
        ([], "/nowhere", "not found: ip (Debian's iproute2), tc"),
    ],
)
def test_where_hosts_cannot_be_made_it_says_why(through, path, message):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"} | ({} if path is None else {"PATH": path})
    command = [*through, sys.executable, RUNNER, "--", "none.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (77, ""), done.stderr
    assert done.stderr.startswith("hosts.py: hosts cannot be made here: ") and message in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "0"], "expected 1 to 250 hosts"),
        (["--ranks-per-host", "0"], "at least 1 rank on each"),
        (["--rate", "fast"], "expected a rate such as 2gbit, 500mbit or none, got 'fast'"),
        (["--rate", "1gbit,2gbit"], "expected one --rate"),
        (["--delay", "1"], "expected a delay such as 1ms, got '1'"),
        (["--max-restarts", "-1"], "--max-restarts must be at least 0"),
        (["--hosts", "200", "--pin"], "200 hosts cannot have a core of their own each"),
    ],
)
def test_absurd_wishes_are_refused(options, message, capsys):
    import hosts

    with pytest.raises(SystemExit) as ended:
        hosts.parse_arguments([*options, "--", "none.py"])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_links_and_places():
    assert [bits_per_second(rate) for rate in ("2gbit", "1.5mbit", None)] == [2e9, 1.5e6, None]
    assert Links(2, pin=False).card()["cores"] == cores() and Links(2, pin=False).shares() is None
    here, there, boxed = Place("a", "k", "p"), Place("b", "l", "p"), Place("b", "k", "q")
    assert describe([here] * 3) is None
    assert describe([here, Place("another name", "k", "p")]) is None, "a name is no place"
    assert describe([here, here, there]) == "ranks 0, 1 on a, rank 2 on b: different machines"
    assert describe([here, boxed]) == "rank 0 on a, rank 1 on b: each in another container of this host"
    assert describe([here, Place("a", "l2345678901", "p")]) == (
        "rank 0 on a (boot k), rank 1 on a (boot l2345678): different machines"
    )
    assert describe([here, Place("a", "k", "q")]).startswith("rank 0 on a (p), rank 1 on a (q): each in another")
    mixed = describe([here, there, here, here, boxed, there])
    assert (
        mixed == "ranks 0, 2, 3 on a, ranks 1, 5 on b (boot l), rank 4 on b (boot k): some in another container of "
        "this host, some on other machines"
    )


@needs_hosts
def test_a_ring_across_hosts_and_the_loss_of_one(mark, tmp_path):
    with Hosts(Links(2, 2, rate="20mbit", pin=False)) as hosts:
        started = hosts.start_ranks([RANKS, "a_host_is_lost", str(tmp_path)], settings(mark))
        while not all((tmp_path / f"stepping{rank}").exists() for rank in range(4)):
            assert all(rank.poll() is None for rank in started), "a rank has failed"
            time.sleep(0.05)
        time.sleep(0.2)
        lost = time.monotonic()
        hosts.kill(1)
        assert [rank.wait(30) for rank in started] == [0, 0, -signal.SIGKILL, -signal.SIGKILL]
    told = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    apart = "ranks 0, 1 on host0, ranks 2, 3 on host1: each in another container of this host"
    for rank, each in enumerate(told):
        assert each["hostname"] == "host0" and each["apart"] < 1e-10
        transport, refused, difference = each["forwards"]
        assert (transport, difference < 1e-10) == ("shm+tcp", True) and apart in refused, each["forwards"]
        assert each["near"] == ["shm", "memory shared by CPU processes of one host", 2]
        assert each["far"][0] == "shm+tcp" and each["far"][1].endswith(f"one host): {apart}"), each["far"]
        name, reason, owners = each["disguised"]
        assert (name, owners) == ("shm+tcp", 4) and re.search(
            r"ranks 0, 1 on host0 \(boot \w+\), ranks 2, 3 on host0 \(boot another-\): different machines$", reason
        ), reason
        end = each["lost"]
        assert end["kind"] == "RingTimeout" and end["steps"] >= 2, end
        assert re.search(r"RotatedLinear (forward|backward), (weight|gradient) hop \d of \d", end["text"]), end
        assert re.search(r"rank \d", end["text"]), end
        assert 0 < end["at"] - lost < host_ranks.TIMEOUT + MARGIN, (rank, end, lost)
    said = " ".join(told[0]["doctor"].split())  # lines are wrapped
    assert re.search(r"host0, boot \S+, process ids pid:\[\d+\] \(those of a container\)", said), said
    assert "Gloo: over eth0 (GLOO_SOCKET_IFNAME)" in said
    assert f"the ring of these 4 ranks {apart} shm+tcp: shared memory inside hosts" in said and told[1]["doctor"] == ""


@needs_hosts
def test_torchrun_meets_across_hosts_and_again_after_a_failure(mark, tmp_path):
    with Hosts(Links(2)) as hosts:
        status = hosts.torchrun([RANKS, "restarts", str(tmp_path)], max_restarts=3, environment=settings(mark))
    assert status == 0
    told = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert {each["host"] for each in told} == {0, 1}
    assert all(each["first"] == 2 for each in told), told
    assert max(each["life"] for each in told) >= 1, "a host that only joins the others again does not count it"
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=host_ranks.LR)
    for step in range(host_ranks.STEPS):
        optimizer.zero_grad()
        mean_loss(plain, 2, step).backward()
        optimizer.step()
    steps, values = torch.load(tmp_path / "saved")
    assert steps == host_ranks.STEPS
    for name, expected in plain.named_parameters():
        assert (values[name] - expected).abs().max() < 1e-10, name


@needs_hosts
def test_strategies_between_hosts(tmp_path, capsys):
    """The rows, with bytes that the kernel counted, the optimizer's apart; another number of ranks is refused."""
    options = ["--model", "mlp-tiny", "--tokens", "16", "--steps", "2", "--warmup", "1", "--hosts", "2"]
    options += ["--output", str(tmp_path / "rows.jsonl")]
    more = ["--strategies", "none,rtp,ddp,fsdp2-gathered", "--rate", "80mbit", "--optimizer", "muon"]
    args = compare_options.parse_arguments([*options, *more])
    rows = {row["strategy"]: row for row in launch(compare.measure_time, args, 2)}
    for name, row in rows.items():
        assert (row["hosts"], row["ranks_per_host"], row["rate"], row["cores"]) == (2, 1, "80mbit", cores())
        assert row["closed_form_bytes"] <= row["sent_bytes"] <= 1.1 * row["closed_form_bytes"] + 4096, row
        assert row["roof_ms"] == pytest.approx(
            max(row["reference_forward_backward_ms"] + row["socket_beside_ms"], row["wire_ms"]) + row["optimizer_ms"]
        )
        assert row["wire_ms"] == pytest.approx(row["sent_bytes"] * 8 / 80e3)
        assert (row["hidden_share"] is None) == (name == "none")
        assert row["socket_beside_ms"] >= row["socket_processor_ms"] > 0
    assert rows["rtp"]["transport"] == "tcp" and rows["none"]["exposed_ms"] == 0.0 == rows["none"]["closed_form_bytes"]
    assert rows["rtp"]["closed_form_bytes"] == 1.5 * 4 * 49920 == 1.5 * rows["ddp"]["closed_form_bytes"]
    assert rows["rtp"]["loss_spread"] < 1e-5, "ranks that train alone are not among those that agree"
    assert abs(rows["none"]["loss"] / rows["rtp"]["loss"] - 1) > 1e-3, "control: they differ"
    payloads = {"none": 0, "rtp": rows["rtp"]["exchange_bytes"], "ddp": 0}
    payloads["fsdp2-gathered"] = rows["rtp"]["matrix_bytes"] / 2
    for name, payload in payloads.items():  # beside it, barriers, and the agreement of rtp's ranks
        assert payload <= rows[name]["optimizer_sent_bytes"] <= 1.1 * payload + 8192, rows[name]
    for more, message in (
        (["--ranks", "3"], "--hosts and --ranks-per-host make 2 ranks, got --ranks [3]"),
        (["--strategies", "none"], "expected one in which ranks train together"),
        (["--device", "cuda"], "made hosts have CPUs alone"),
        (["--rate", "1gbit,1gbit"], "--rate: expected each once"),
    ):
        with pytest.raises(SystemExit):
            compare_options.parse_arguments([*options, *more])
        assert message in capsys.readouterr().err
    with pytest.raises(ChildProcessError, match="failed with status 1"):
        launch(_fails, Namespace(device="cpu", threads=1, network=Links(1)), 1)


def _fails(place, args):
    raise SystemExit("on purpose")


@needs_hosts
def test_a_delay_needs_netem():
    try:
        with Hosts(Links(2, delay="30ms")) as hosts:
            start = time.monotonic()
            assert "1 received" in said_in(hosts, 0, "ping -c 1 host1 || echo 1 received")
            assert time.monotonic() - start > 0.06
    except NoHosts as problem:
        assert "--delay needs a kernel with netem" in str(problem)
