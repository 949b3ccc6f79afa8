"""A Slurm of one's own: a controller and two nodes, on this machine, for as long as the tests last.

Needs root, since a node daemon starts jobs for others, and Debian's slurm-wlm and munge (22.05 or newer), but
neither systemd nor control groups, and no name service: everything talks over loopback, on ports of its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

NODES = ("n1", "n2")

#: What Slurm believes a node to have, so that three jobs of 4 tasks run beside one of 2. They share the few
#: cores of this machine, but most of their time is starting up, which is waiting.
CPUS = 7

#: Variables of the surroundings that would change what a job believes of itself, or what a script does.
FOREIGN = (
    "RINGMPI_",
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "PMI_",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
)

#: States of a job after which nothing more happens to it.
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
)

#: Slurm's own time for a job to end after SIGTERM, in seconds: ranks end within 5 s and a step.
KILL_WAIT = 8

CONFIGURATION = """\
ClusterName=ringmpi
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A requeued job waits until credentials of its earlier life have expired: 5 s is the least that can be said.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Nodes have as many CPUs as is said here, not as the machine has.
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2
MpiDefault=none
KillWait={kill_wait}
ReturnToService=2
MailProg=/bin/true
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs={cpus}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=60 PriorityTier=1
PartitionName=urgent Nodes=n[1-2] MaxTime=60 PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Return why no Slurm can be started here, or nothing."""
    if os.geteuid() != 0:
        return "needs root, to start Slurm's daemons"
    lacking = [
        name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None
    ]
    return f"no {', '.join(lacking)}: apt-get install slurm-wlm munge" if lacking else ""


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job, or of a task of a job array."""

    state: str
    reason: str
    exit_code: int
    restarts: int


class Cluster:
    """The daemons, the configuration, and the environment in which commands find them."""

    def __init__(self) -> None:
        # Not below pytest's folder, which may have too long a name for a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="ringmpi-slurm-"))
        self._running = ExitStack()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self.environment = own | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            # Slurm's nodes have names that only Slurm knows; ranks meet on this machine's loopback.
            "HYDRA_IFACE": "lo",
            # As jobs/site/local.sh does, for commands that read no site file.
            "MPIR_CVAR_CH4_NETMOD": "ofi",
        }

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are there."""
        configuration = CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            ports=_free_ports(3),
            folder=self.folder,
            kill_wait=KILL_WAIT,
            cpus=CPUS,
        )
        self.folder.chmod(0o755)  # For the sockets in it.
        (self.folder / "slurm.conf").write_text(configuration)
        # Or what an earlier cluster has left in /tmp keeps its PMIx from starting. Both nodes would use one
        # folder for a step, so with PMIx a step has one node.
        (self.folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={self.folder}\n")
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        words = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *words)
        self.await_(lambda: (self.folder / "munge.socket").exists(), "munged has a socket", 20)
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        self.await_(self._all_idle, "both nodes are idle", 40)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Take the daemon of a node away, as when its power fails, and let the controller see it."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait(10)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed by a test")

    def stop(self) -> None:
        """End all jobs and daemons, and whatever process of theirs is left."""
        if self._all_up():
            self.run("scancel", "--user=root", check=False)
        for daemon in reversed(list(self._daemons.values())):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.folder)

    def processes(self) -> list[psutil.Process]:
        """Return all processes that know this cluster, other than its daemons and this one."""
        found = []
        daemons = {daemon.pid for daemon in self._daemons.values()}
        for process in psutil.process_iter():
            try:
                if (
                    self._is_ours(process)
                    and process.pid not in daemons
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def run(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that may talk to this Slurm."""
        done = subprocess.run(
            list(map(str, command)),
            env=self.environment | dict(env or {}),
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"{command}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        )
        return done

    def job(self, name: str) -> Job:
        """Return how a job is, or a task of an array, such as ``7_0``."""
        told = self.run("scontrol", "show", "job", "--oneliner", name).stdout
        fields = dict(word.split("=", 1) for word in told.split() if "=" in word)
        return Job(
            fields["JobState"],
            fields["Reason"],
            int(fields["ExitCode"].split(":")[0]),
            int(fields["Restarts"]),
        )

    def await_state(self, name: str, states: Sequence[str], timeout: float) -> Job:
        """Wait until a job is in one of some states."""
        self.await_(
            lambda: self.job(name).state in states, f"job {name} is {' or '.join(states)}", timeout
        )
        return self.job(name)

    def await_(self, condition: Callable[[], bool], what: str, timeout: float) -> None:
        """Wait for something to become true; a time limit, or a daemon that dies meanwhile, is a failure."""
        limit = time.monotonic() + timeout
        while not condition():
            late = time.monotonic() > limit
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            assert not late, f"it took {timeout:g} s until {what}, and did not happen\n{self.logs()}"
            assert not dead, f"{dead} ended before {what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """Return what the daemons and the queue say, for a person who looks for a fault."""
        queue = ["squeue", "--states=all", "--format=%i %j %T %r %M"]
        said = [
            subprocess.run(
                queue, env=self.environment, capture_output=True, text=True, timeout=20
            ).stdout
        ]
        for path in sorted(self.folder.glob("*.log")):
            said.append(
                f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            )
        return "\n".join(said)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.said").open("a") as said:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                # A terminal's Ctrl-C ends the tests, which then end the daemons.
                start_new_session=True,
            )

    def _is_ours(self, process: psutil.Process) -> bool:
        if process.name().startswith("slurmstepd"):  # It writes its title over its environment.
            return any(file.path.startswith(f"{self.folder}/") for file in process.open_files())
        return bool(process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"])

    def _all_up(self) -> bool:
        return bool(self._daemons) and all(daemon.poll() is None for daemon in self._daemons.values())

    def _all_idle(self) -> bool:
        words = ("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
        return self.run(*words, check=False).stdout.split() == ["idle"] * len(NODES)


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on. They are all held until the last is found, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
