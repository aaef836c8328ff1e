"""Record the environment that real launchers give their processes on three hosts of namespaces.
`tests/unit/base/test_world.py` uses the records.

    python -m tests.record_launchers        # as root; half a minute

Needs Debian's openmpi-bin, mpich, slurmctld, slurmd, slurm-client, munge and openssh-server. Every
case starts a program that writes the variables that launchers set and the address of its host. The
records contain no path and no secret. They are written to `tests/unit/base/launchers.json`.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.hosts import Host, Process, hosts

RECORDS = Path(__file__).parent / "unit" / "base" / "launchers.json"
PROGRAMS = ("mpirun.openmpi", "mpiexec.hydra", "slurmctld", "slurmd", "srun", "munged", "sshd")
SPOKEN = re.compile(
    r"(SLURM_|OMPI_|PMIX_|PMI_|MPI_|MV2_|PET_|GROUP_|ROLE_|TORCHELASTIC_|MASTER_|LOCAL_)\w+|RANK|WORLD_SIZE|NODE_RANK"
)
KEPT = re.compile(r"(\d+\.0;)?(tcp://)?[^/\s]{0,160}")  # neither paths nor command lines
WITHHELD = re.compile(
    r"\w*(SECURE|KEY|TOKEN|SECRET|UID|GID|USER|FD|PORT_RANGE|SRUN_COMM|TASK_PID|VERSION|ARGV|COMMAND)\w*"
)
SECONDS = 60.0

RANK = """
import json, os, socket, sys, uuid
row = {"host": socket.gethostbyname(socket.gethostname()), "environ": dict(os.environ)}
path = f"%s/{uuid.uuid4().hex}"
open(path + ".part", "w").write(json.dumps(row))
os.rename(path + ".part", path + ".json")
"""
SLURM = """
ClusterName=recorded
SlurmctldHost=h0
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=h[0-1] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""
SSH = (
    "Host *\n IdentityFile {folder}/key\n StrictHostKeyChecking no\n UserKnownHostsFile "
    "/dev/null\n LogLevel ERROR\n"
)


class Recorder:
    """Run cases and collect the output of their processes. folder: scratch, shared by all hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, folder / "rows"
        self.rows.mkdir()
        (folder / "rank.py").write_text(RANK % self.rows)
        self.program = [sys.executable, "-S", str(folder / "rank.py")]
        self.cases: dict[str, Any] = {}

    def record(
        self, name: str, host: Host, command: Sequence[str], count: int, **environ: str
    ) -> None:
        """Run a command that starts `count` copies of the program, and keep their environments."""
        print(f"{name} ...", flush=True)  # noqa: T201
        environ = {"SLURM_CONF": f"{self.folder}/slurm.conf", **environ}
        said = host.run([*command, *self.program], environ, cwd=str(self.folder)).communicate(
            timeout=SECONDS
        )[0]
        found = [json.loads(path.read_text()) for path in sorted(self.rows.glob("*.json"))]
        for path in self.rows.glob("*.json"):
            path.unlink()
        if len(found) != count:
            raise SystemExit(f"{name}: {len(found)} of {count} processes have written.\n{said}")
        ranks = [{"host": row["host"], "environ": _kept(row["environ"])} for row in found]
        said_to = " ".join(command).replace(str(self.folder), ".").replace(sys.executable, "python")
        self.cases[name] = {"command": said_to, "ranks": ranks}


def _kept(environ: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environ.items())
        if SPOKEN.fullmatch(name) and not WITHHELD.fullmatch(name) and KEPT.fullmatch(value)
    }


@contextmanager
def running(*programs: Process | subprocess.Popen[str]) -> Iterator[None]:
    """End these programs when the block ends."""
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def _ssh(folder: Path, everyone: Sequence[Host]) -> list[Process]:
    for name in ("key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    (folder / "config").write_text(SSH.format(folder=folder))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec ssh -F {folder}/config "$@"\n')
    (folder / "ssh").chmod(0o700)
    Path("/run/sshd").mkdir(exist_ok=True)
    words = ["-D", "-e", "-h", f"{folder}/host_key", "-o", f"AuthorizedKeysFile={folder}/key.pub"]
    words += ["-o", "StrictModes=no", "-o", "PidFile=none", "-o", "PermitRootLogin=yes"]
    return [host.run(["/usr/sbin/sshd", *words]) for host in everyone]


def _slurm(folder: Path, everyone: Sequence[Host]) -> list[Process | subprocess.Popen[str]]:
    for name in ("state", "h0", "h1", "munge"):
        (folder / name).mkdir(mode=0o700)
    (folder / "slurm.conf").write_text(SLURM.format(folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    Path("/run/munge").mkdir(mode=0o755, exist_ok=True)
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("log", "pid", "seed")]
    started: list[Process | subprocess.Popen[str]] = [
        subprocess.Popen(
            ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *munge],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    ]
    environ = {"SLURM_CONF": f"{folder}/slurm.conf"}
    started.append(everyone[0].run(["slurmctld", "-D"], environ))
    for host in everyone[:2]:
        mount = "mount -t tmpfs cgroup /sys/fs/cgroup && exec slurmd -D -N " + host.name
        started.append(host.run(["bash", "-c", mount], environ))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        said = everyone[0].run(["sinfo", "-h", "-o", "%D %t"], environ).communicate()[0]
        if said.strip() == "2 idle":
            return started
        time.sleep(0.5)
    raise SystemExit(f"Slurm did not start: {said}\n" + (folder / "slurmctld.log").read_text())


def record(folder: Path, everyone: Sequence[Host]) -> dict[str, Any]:
    """Run every case and return the records."""
    h0, _, h2 = everyone
    at, keep = Recorder(folder), str(folder / "ssh")
    open_mpi = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
    over_two = [*open_mpi, "--mca", "plm_rsh_agent", keep, "--host", "h0:2,h1:2", "-np", "4"]
    hydra = [
        "mpiexec.hydra",
        "-launcher",
        "ssh",
        "-launcher-exec",
        keep,
        "-hosts",
        "h0,h1",
        "-ppn",
        "2",
        "-n",
        "4",
    ]
    srun = ["srun", "--overcommit", "-N2"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    at.record("torchrun", h0, torchrun, 2)
    with running(*_ssh(folder, everyone)):
        time.sleep(1)
        at.record("Open MPI on one host", h0, [*open_mpi, "-np", "2"], 2)
        at.record("Open MPI on two hosts", h0, over_two, 4)
        at.record("Open MPI on two hosts, from a third", h2, over_two, 4)
        at.record("Open MPI, one process", h0, [*open_mpi, "-np", "1"], 1)
        at.record("MPICH on one host", h0, ["mpiexec.hydra", "-n", "2"], 2)
        at.record("MPICH on two hosts", h0, hydra, 4)
        at.record("MPICH with a meeting place", h0, [*hydra, "-genv", "MASTER_ADDR", h0.address], 4)
    with running(*_slurm(folder, everyone)):
        at.record("srun on two hosts", h0, [*srun, "-n4"], 4)
        at.record("srun, uneven", h0, [*srun, "-n3", "--distribution=block"], 3)
        at.record("srun from a third host", h2, [*srun, "-n2"], 2)
        at.record("srun with PMI2", h0, [*srun, "-n4", "--mpi=pmi2"], 4)
        parts = ["-N1", "-n2", "--overcommit"], ["-N1", "-n1"]
        at.record(
            "a heterogeneous job",
            h0,
            ["salloc", *parts[0], ":", *parts[1], "srun", "--het-group=0,1"],
            3,
        )
        at.record("srun of one task", h0, ["srun", "-n1"], 1)
        at.record("an allocation without srun", h0, ["salloc", "-N2", "-n4", "--overcommit"], 1)
        batch = folder / "batch.sh"
        batch.write_text("#!/bin/sh\nexec " + " ".join(at.program) + "\n")
        at.record(
            "a batch script without srun",
            h0,
            ["sbatch", "--wait", "-N2", "-n4", "--overcommit", str(batch)],
            1,
        )
        at.record(
            "Open MPI in an allocation",
            h0,
            ["salloc", "-N2", "-n4", "--overcommit", *open_mpi, "-np", "4"],
            4,
        )
        two = [
            "salloc",
            "-N2",
            "-n2",
            "--overcommit",
            *open_mpi,
            "--map-by",
            "ppr:1:node",
            "-np",
            "2",
        ]
        at.record("Open MPI in an allocation, one on each host", h0, two, 2)
        at.record(
            "MPICH in an allocation",
            h0,
            ["salloc", "-N2", "-n4", "--overcommit", "mpiexec.hydra", "-n", "4"],
            4,
        )
        one_host = [
            "salloc",
            "-N2",
            "-n2",
            "--overcommit",
            "mpiexec.hydra",
            "-hosts",
            "h0",
            "-n",
            "2",
        ]
        at.record("MPICH in an allocation, as many ranks as hosts, all on one", h0, one_host, 2)
    return at.cases


def main() -> None:
    missing = [
        name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/bin") is None
    ]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: not installed")
    with tempfile.TemporaryDirectory() as scratch, hosts(3) as everyone:
        cases = record(Path(scratch), everyone)
    RECORDS.write_text(json.dumps(cases, indent=1) + "\n")
    print(f"{len(cases)} cases: {RECORDS}")  # noqa: T201


if __name__ == "__main__":
    main()
