"""examples/launch: SLURM on two emulated hosts, Open MPI, Ray Train and elastic torchrun train on two ranks; the job of
Kubernetes has the fields of its schema."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from grids import SWEEP
from shared.hosts import Hosts, Links, refusal

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
PORT = 29533
WHOLE = 256 * 64 + 2 * 64 + 64 * 256 + 256 + 256 * 256 + 256  # parameters of the quickstart
TRAINED = 0.9 * 5.545  # of the quickstart's loss before training, log(256)

SLURM = """
ClusterName=made
SlurmctldHost=host0
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=host[0-1] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not found: {', '.join(missing)}")


def environment(**more: str) -> dict[str, str]:
    """The variables of a run whose `python` is this one."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


in_sweeps = pytest.mark.skipif(not SWEEP, reason="takes half a minute: make sweep")


def assert_trained(told: str) -> None:
    """Two ranks of the quickstart have trained, and each has half of the parameters."""
    found = re.findall(r"loss ([\d.]+), (\d+) parameters", told)
    assert [int(kept) for _, kept in found] == [WHOLE // 2] * 2 and all(float(loss) < TRAINED for loss, _ in found), (
        told
    )


@in_sweeps
@needs("slurmctld", "slurmd", "munged", "sbatch")
@pytest.mark.skipif(refusal() is not None, reason=f"hosts cannot be made here: {refusal()}")
def test_slurm_trains_on_two_nodes(tmp_path):
    """A controller and two nodes; the nodes have a network address, processes and shared memory of their own."""
    (tmp_path / "slurm.conf").write_text(SLURM.format(folder=tmp_path))
    (tmp_path / "key").write_bytes(os.urandom(128))
    (tmp_path / "key").chmod(0o400)
    files = [f"--{what}-file={tmp_path}/{what}" for what in ("key", "pid", "log", "seed")]
    settings = environment(SLURM_CONF=f"{tmp_path}/slurm.conf", GLOO_SOCKET_IFNAME="")
    log = (tmp_path / "daemons").open("w")
    with Hosts(Links(2)) as hosts:

        def start(host: int, *command: str) -> None:
            hosts.start(host, command, settings, stdout=log, stderr=log)

        def ask(*command: str) -> str:
            return hosts.start(0, command, settings, stdout=subprocess.PIPE, text=True).communicate(timeout=200)[0]

        start(0, "munged", "--foreground", "--force", f"--socket={tmp_path}/munge.socket", *files)
        start(0, "slurmctld", "-D")
        for host in range(2):
            start(host, "slurmd", "-D", "-N", f"host{host}")
        deadline = time.monotonic() + 60
        while "idle 2" not in (state := ask("sinfo", "--noheader", "--format=%t %D")):
            assert time.monotonic() < deadline, state + (tmp_path / "daemons").read_text()[-3000:]
            time.sleep(0.2)
        job = [str(LAUNCH / "slurm.sh"), str(ROOT / "examples" / "quickstart.py")]
        ask("sbatch", "--wait", f"--output={tmp_path}/job", *job)
        sent = hosts.sent(1)
    assert_trained((tmp_path / "job").read_text())
    assert sent > 20 * 4 * WHOLE // 2, "control: in 20 steps every shard has left its host"


@needs("mpirun")
def test_mpirun_trains():
    command = ["mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe", "--allow-run-as-root"]
    command += ["-x", f"MASTER_PORT={PORT}", str(LAUNCH / "mpirun.sh"), str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_trained(done.stdout)


def test_ray_train(tmp_path):
    pytest.importorskip("ray.train", reason="Ray Train is not installed")
    program = [sys.executable, str(LAUNCH / "ray_train.py"), "--workers", "2"]
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # Ray's sockets have long names below it
        settings = environment(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=short, HOME=str(tmp_path))
        done = subprocess.run(program, capture_output=True, text=True, env=settings, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"\{'loss': ([\d.]+), 'kept': (\d+), 'hosts': (\d)\}", done.stdout)
    assert found is not None, done.stdout[-3000:]
    loss, kept, hosts = map(float, found.groups())
    assert (kept, hosts) == ((256 * 64 + 2 * 64 + 64 * 256 + 256) // 2, 1) and loss < TRAINED


def test_kubernetes_job_has_the_fields_of_kubeflow():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow_trainer_api is not installed")
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict
    assert read(job).to_dict() == job
    wrong = {**job, "spec": {**job["spec"], "nodes": 2}}
    assert read(wrong).to_dict() != wrong, "control: a field that is not there gets lost"
    assert job["spec"]["trainer"]["command"][-1].endswith("examples/quickstart.py")


def _elastic(folder: Path, name: str, **more: str) -> subprocess.Popen:
    """Starts the torchrun of one host."""
    settings = environment(PORT=str(PORT + 1), LAST_CALL="1", RTP_RECORD_DIR=str(folder), **more)
    program = [str(LAUNCH / "elastic.sh"), "--folder", str(folder), "--steps", "80", "--step-time", "0.1"]
    log = (folder / name).open("w")
    return subprocess.Popen(program, env=settings, stdout=log, stderr=log, start_new_session=True)


def _kill_rank(host: subprocess.Popen) -> None:
    (rank,) = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
    os.kill(int(rank), signal.SIGKILL)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def _wait(what: str, holds, *logs: Path) -> None:
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline, f"{what}: {''.join(log.read_text()[-3000:] for log in logs)}"
        time.sleep(0.1)


@in_sweeps
def test_elastic_torchrun_goes_on_with_the_hosts_that_are_left(tmp_path):
    """Two hosts with a rank each; one rank dies, and both start again; then one host dies, and the other continues."""

    def steps() -> list[dict]:
        log = tmp_path / "log.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    logs = [tmp_path / name for name in ("first", "second")]
    first, second = _elastic(tmp_path, "first"), None
    try:
        _wait("the first has the store", lambda: _listens(PORT + 1), logs[0])
        second = _elastic(tmp_path, "second")
        _wait("both train", lambda: len(steps()) > 6, *logs)
        _kill_rank(second)
        seen = len(steps())
        _wait("both start again", lambda: len(steps()) > seen + 6, *logs)
        os.kill(second.pid, signal.SIGSTOP)  # it starts no other rank before it dies, too
        _kill_rank(second)
        second.kill()
        assert first.wait(90) == 0, logs[0].read_text()[-3000:]
    finally:
        for host in (first, second):
            if host is not None and host.poll() is None:
                host.terminate()  # ends its rank
                host.wait(20)
    result = json.loads(logs[0].read_text().strip().splitlines()[-1])
    assert result["ranks"] == 1 and result["first"] > 0, result
