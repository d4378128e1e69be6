"""A SLURM cluster of several nodes on this machine alone: real daemons, under any user, without systemd or root.

Debian's slurmd may run several times on one host, each as a node of its own (``--enable-multiple-slurmd``). All files
are in one short-lived folder and all ports are free ones, so that any number of clusters can stand side by side. Its
processes are found by ``SLURM_CONF`` in their environment, which is the path of a file in that folder.
"""

import atexit
import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from support.ports import find_free_ports

PROGRAMS = ("sbatch", "srun", "slurmctld", "slurmd", "munged", "setpriv")
_FOREIGN_VARIABLES = ("SLURM", "SBATCH_", "SRUN_", "SCANCEL_", "SQUEUE_", "SINFO_")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # daemons are not on a user's path

_DEVICE_FILES = ("/dev/null", "/dev/zero")  # play the GPUs of a node; nobody opens them

_SETTINGS = {
    "GresTypes": "gpu",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "SlurmctldDebug": "verbose",
    "SlurmdDebug": "verbose",
    "LogTimeFormat": "iso8601_ms",
    "MailProg": "/bin/true",
    # no control groups, no accounting database, no MPI
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    "JobCompType": "jobcomp/none",
    "MpiDefault": "none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0",
    "SlurmdParameters": "config_overrides",  # nodes may claim more cores than this machine has
    "ReturnToService": 2,
    "SlurmctldTimeout": 30,
    "SlurmdTimeout": 10,
    "TCPTimeout": 2,
    "MessageTimeout": 5,
    "UnkillableStepTimeout": 10,
    "KillWait": 5,  # seconds between SIGTERM and SIGKILL to a job that is cancelled or has reached its time limit
    "OverTimeLimit": 0,
    "JobRequeue": 1,
    "EnforcePartLimits": "ALL",  # what can never run is refused by sbatch instead of waiting for ever
    "PropagateResourceLimitsExcept": "MEMLOCK,NPROC",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
}


def find_missing() -> str:
    """Why no cluster can be started here; empty if one can."""
    for program in PROGRAMS:
        if not shutil.which(program, path=_PATH):
            return f"{program} is not installed"
    return ""


def is_true_within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Ask again and again until ``condition`` holds or the time is up."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def read_environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Process id and environment of all processes of this machine that we may look into."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile or belongs to someone else
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            yield int(folder.name), dict(entry.split("=", 1) for entry in entries if "=" in entry)


class Cluster:
    """A cluster of two nodes with four cores each that lives as long as the ``with`` block.

    Partitions are ``main`` (the default), ``low``, whose jobs are requeued when a job of ``high`` wants their nodes.

    """

    nodes = ("node1", "node2")

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._commands: dict[str, tuple[str, ...]] = {}  # of the daemons, by name
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._last_descriptions: dict[str, dict[str, str]] = {}

    def __enter__(self) -> Self:
        self.folder = _make_folder()
        atexit.register(self.stop)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all jobs and daemons and remove the folder; not a second time, and not in a forked child."""
        if os.getpid() != self._owner or not self.folder.exists():
            return
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.end_jobs()
        for daemon in reversed(self._daemons):
            self.kill(daemon)
        # what they have started: slurmstepd, tasks, waiting clients
        is_true_within(10, lambda: not self._kill(process for process, _ in self._own_processes()))
        shutil.rmtree(self.folder)
        atexit.unregister(self.stop)

    def _start(self) -> None:
        key = self.folder / "munge.key-file"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        (self.folder / "slurmctld").mkdir()
        for node in self.nodes:
            (self.folder / f"spool.{node}").mkdir()
        self.configuration.write_text(self._render())
        gpus = "".join(f"Name=gpu File={file}\n" for file in _DEVICE_FILES)
        (self.folder / "gres.conf").write_text(gpus)
        # --force: a parent folder may be writable for a group
        files = [f"--{kind}={self.folder}/munge.{kind}" for kind in ("key-file", "socket", "pid-file", "seed-file")]
        self._commands = {"munged": ("munged", "--foreground", "--force", *files), "slurmctld": ("slurmctld", "-D")}
        self._commands |= {node: ("slurmd", "-D", "-N", node) for node in self.nodes}
        for name in self._commands:
            self.start(name)
        if not is_true_within(30, self._is_ready):
            raise RuntimeError(f"the nodes of the cluster did not become idle.\n{self._tails()}")

    def _is_ready(self) -> bool:
        states = self.run("sinfo", "--noheader", "--partition=main", "--Node", "--format=%t", check=False)
        return states.split() == ["idle"] * len(self.nodes)

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._commands[name]],  # it dies with us
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for pytest, which ends us in its own order
            )

    def kill(self, name: str) -> None:
        """As in a crash."""
        self._daemons[name].kill()
        self._daemons[name].wait()

    def end_jobs(self) -> None:
        """End all jobs within moments, whatever they do about it."""
        if "slurmctld" not in self._daemons or self._daemons["slurmctld"].poll() is not None:
            return
        if jobs := self.run("squeue", "--noheader", "--format=%A").split():
            self.run("scancel", *jobs, check=False)
            # scancel would wait for KillWait; and it finds children of tasks, but not if their parents have ended
            self.run("scancel", "--full", "--signal=KILL", *jobs, check=False)
            self._kill(process for process, variables in self._own_processes() if "SLURM_JOB_ID" in variables)
            is_true_within(3, lambda: not self.run("squeue", "--noheader"))  # in vain if a slurmd is dead

    def _kill(self, processes: Iterable[int]) -> bool:
        """Tell whether there were any."""
        rest = list(processes)
        for process in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return bool(rest)

    def _own_processes(self) -> Iterator[tuple[int, dict[str, str]]]:
        for process, variables in read_environments():
            if variables.get("SLURM_CONF") == str(self.configuration):
                yield process, variables

    @property
    def configuration(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """Ours, without what a job around us has left in it, and with the way to this cluster."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_VARIABLES)}
        return own | {"SLURM_CONF": str(self.configuration), "PATH": _PATH}

    def _render(self) -> str:
        user = pwd.getpwuid(os.getuid()).pw_name
        controller_port, *ports = find_free_ports(1 + len(self.nodes))
        host = socket.gethostname()
        address = socket.gethostbyname(host)  # the daemons listen there alone
        partition = f"Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP"
        settings = {
            "ClusterName": self.folder.name,
            "SlurmctldHost": f"{host.partition('.')[0]}({address})",  # slurmctld compares it with `hostname -s`
            "SlurmctldPort": controller_port,
            "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
            "SlurmUser": user,
            "SlurmdUser": user,
            # cred_expire is also how long a requeued job waits before it may start again; less than 5 counts as 120
            "AuthInfo": f"socket={self.folder}/munge.socket,cred_expire=5",
            "StateSaveLocation": self.folder / "slurmctld",
            "SlurmdSpoolDir": self.folder / "spool.%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "%n.pid",
        } | _SETTINGS
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [
            f"NodeName={node} NodeHostname={node} NodeAddr={address} Port={port} "
            f"CPUs=4 RealMemory=4000 Gres=gpu:{len(_DEVICE_FILES)} State=UNKNOWN"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        lines += [
            f"PartitionName=main {partition} PriorityTier=5 PreemptMode=off Default=YES",
            f"PartitionName=low {partition} PriorityTier=1 PreemptMode=requeue GraceTime=10",
            f"PartitionName=high {partition} PriorityTier=10 PreemptMode=off",
        ]
        return "\n".join(lines) + "\n"

    def run(self, *command: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run a SLURM client and return what it prints; its errors too, if failure is no error (``check=False``)."""
        result = subprocess.run(
            command,
            env=self.environment | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(command)} has failed with {result.returncode}: {result.stderr.strip()}")
        return result.stdout if check else result.stdout + result.stderr

    def submit(
        self, script_path: Path, *sbatch_options: str, env: Mapping[str, str] | None = None, args: Sequence[object] = ()
    ) -> int:
        """Submit a job, which starts in the folder of its script; return its number."""
        command = ["sbatch", "--parsable", f"--chdir={script_path.parent}", *sbatch_options, str(script_path)]
        return int(self.run(*command, *map(str, args), env=env))

    def describe(self, job: int | str) -> dict[str, str]:
        """What ``scontrol show job`` knows, or knew when the job was last seen; of an array, its first element."""
        lines = self.run("scontrol", "--oneliner", "show", "job", str(job), check=False).splitlines()
        if lines and lines[0].startswith("JobId="):
            fields = re.findall(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?= +[A-Z][\w/:]*=| *$)", lines[0])
            self._last_descriptions[str(job)] = dict(fields)
        return self._last_descriptions[str(job)]

    def state(self, job: int | str) -> str:
        return self.describe(job)["JobState"]

    def restarts(self, job: int | str) -> int:
        return int(self.describe(job)["Restarts"])

    def output(self, job: int | str) -> str:
        path = Path(self.describe(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job: int | str, *states: str, timeout: float = 30) -> str:
        """Wait until the job is in one of the states, and return which."""
        self.wait_until(lambda: self.state(job) in states, job, timeout, f"never was in state {' or '.join(states)}")
        return self.state(job)

    def wait_until(self, condition: Callable[[], bool], job: int | str, timeout: float, complaint: str) -> None:
        """Fail with all that is known of the job if the condition does not come true in time."""
        if not is_true_within(timeout, condition):
            output = "\n".join(self.output(job).splitlines()[-30:])
            raise AssertionError(
                f"job {job} {complaint} in {timeout} s; it is {self.state(job)} ({self.describe(job)['Reason']}).\n"
                f"--- its output\n{output}\n{self._tails()}"
            )

    def signal(self, job: int | str, name: str, *options: str) -> None:
        """Send a signal to the steps of a job; ``--batch`` and ``--full`` are the options that change whom."""
        self.run("scancel", f"--signal={name}", *options, str(job))

    def _tails(self) -> str:
        """The last lines of all logs."""
        texts = [(log.name, log.read_text(errors="replace").splitlines()[-15:]) for log in self.folder.glob("*.log")]
        return "\n".join(line for name, lines in texts for line in [f"--- {name}", *lines])


def _make_folder() -> Path:
    """A short path: SLURM appends to it, and a Unix socket's path must not exceed 107 characters."""
    parent = next((parent for parent in ("/tmp", "/var/tmp") if os.access(parent, os.W_OK | os.X_OK)), None)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="lv"))
    folder.chmod(0o711)  # munged wants its socket to be reachable
    return folder
