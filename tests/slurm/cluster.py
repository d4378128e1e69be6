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


def find_parent(process: int) -> int:
    """Id of the parent of a process; 0 if it has ended meanwhile."""
    status = _read_status(process)
    return int(status[1]) if status else 0


def is_running(process: int) -> bool:
    """Whether it still does something; the dead whom nobody has buried do not."""
    return _read_status(process)[:1] not in ([], ["Z"], ["X"])


def _read_status(process: int) -> list[str]:
    """State, parent and more."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Daemon:
    """A program in the foreground, in a session of its own."""

    def __init__(
        self, entrance: Sequence[str], program: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        # It dies with its parent: with us, or with the nsenter that only waits for it and is all that we could kill
        self.command = [*entrance, "setpriv", "--pdeathsig", "KILL", *program]
        self._environment, self.log = environment, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        if self.is_alive:
            raise RuntimeError(f"{self.command[-1]} is running already.")
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for pytest, which ends us in its own order
            )

    def kill(self) -> None:
        """As in a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Cluster:
    """A cluster that lives as long as the ``with`` block.

    Partitions are ``main`` (the default), ``low``, whose jobs are requeued when a job of ``high`` wants their nodes.

    Args:
        num_nodes: Nodes are called ``node1``, ``node2`` and so on.
        cpus_per_node: What each node claims to have.
        kill_wait: Seconds between SIGTERM and SIGKILL to a job that is cancelled or has reached its time limit.
        grace_time: Seconds between the signal that announces a preemption and the requeue.
        preempt_send_user_signal: Whether a job of ``low`` that asked for one (``sbatch --signal``) gets its own signal
            instead of SIGTERM when it is preempted.
        settings: Further lines of slurm.conf.
    """

    controller_host = socket.gethostname().partition(".")[0]  # slurmctld compares it with `hostname -s`

    def __init__(
        self,
        num_nodes: int = 2,
        cpus_per_node: int = 4,
        *,
        kill_wait: int = 5,
        grace_time: int = 10,
        preempt_send_user_signal: bool = True,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
        self.cpus_per_node, self.grace_time = cpus_per_node, grace_time
        self._settings = _SETTINGS | {"KillWait": kill_wait} | dict(settings or {})
        if preempt_send_user_signal:
            self._settings["SlurmctldParameters"] = "preempt_send_user_signal"
        self._owner = os.getpid()
        self._daemons: dict[str, Daemon] = {}
        self._last_descriptions: dict[str, dict[str, str]] = {}

    # --- life

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
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
        # what they have started: slurmstepd, tasks, waiting clients
        is_true_within(10, lambda: not self._kill(process for process, _ in self._own_processes()))
        self._remove_network()
        shutil.rmtree(self.folder)
        atexit.unregister(self.stop)

    def _start(self) -> None:
        key = self.folder / "munge.key-file"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        (self.folder / "slurmctld").mkdir()
        for node in self.nodes:
            (self.folder / f"spool.{node}").mkdir()
        self._add_network()
        self.configuration.write_text(self._render())
        gpus = "".join(f"Name=gpu File={file}\n" for file in _DEVICE_FILES)
        (self.folder / "gres.conf").write_text(gpus)
        # --force: a parent folder may be writable for a group
        files = [f"--{kind}={self.folder}/munge.{kind}" for kind in ("key-file", "socket", "pid-file", "seed-file")]
        self._add_daemon("munged", [], "munged", "--foreground", "--force", *files)
        self._add_daemon("slurmctld", self._enter_controller(), "slurmctld", "-D")
        for node in self.nodes:
            self._add_daemon(node, self._enter_node(node), "slurmd", "-D", "-N", node)
        for daemon in self._daemons.values():
            daemon.start()
        is_true_within(30, lambda: self._has_lost_daemons() or self._is_ready())
        if self._has_lost_daemons() or not self._is_ready():
            raise RuntimeError(f"the nodes of the cluster did not become idle.\n{self._tails()}")

    def _is_ready(self) -> bool:
        return all(self.node_state(node) == "idle" for node in self.nodes)

    def _has_lost_daemons(self) -> bool:
        return not all(daemon.is_alive for daemon in self._daemons.values())

    def end_jobs(self) -> None:
        """End all jobs within moments, whatever they do about it."""
        if not (self._daemons.get("slurmctld") and self._daemons["slurmctld"].is_alive):
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

    def _add_daemon(self, name: str, entrance: Sequence[str], *program: str) -> None:
        self._daemons[name] = Daemon(entrance, program, self.environment, self.folder / f"{name}.log")

    # --- what a subclass changes

    def _add_network(self) -> None:
        ports = [str(port) for port in find_free_ports(1 + len(self.nodes))]
        address = socket.gethostbyname(socket.gethostname())
        # the daemons then listen at this address alone, which is the one that the host name has
        self._settings |= {"CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny", "SlurmctldPort": ports[0]}
        self._addresses = {node: f"{address} Port={port}" for node, port in zip(self.nodes, ports[1:], strict=True)}
        self._controller_address = address

    def _remove_network(self) -> None:
        """There is none of our own."""

    def _enter_controller(self) -> list[str]:
        return []

    def _enter_node(self, node: str) -> list[str]:
        return []

    # --- settings

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
        partition = f"Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP"
        settings = {
            "ClusterName": self.folder.name,
            "SlurmctldHost": f"{self.controller_host}({self._controller_address})",
            "SlurmUser": user,
            "SlurmdUser": user,
            # cred_expire is also how long a requeued job waits before it may start again; less than 5 counts as 120
            "AuthInfo": f"socket={self.folder}/munge.socket,cred_expire=5",
            "StateSaveLocation": self.folder / "slurmctld",
            "SlurmdSpoolDir": self.folder / "spool.%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "%n.pid",
        } | self._settings
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [
            f"NodeName={node} NodeHostname={node} NodeAddr={self._addresses[node]} "
            f"CPUs={self.cpus_per_node} RealMemory=4000 Gres=gpu:{len(_DEVICE_FILES)} State=UNKNOWN"
            for node in self.nodes
        ]
        lines += [
            f"PartitionName=main {partition} PriorityTier=5 PreemptMode=off Default=YES",
            f"PartitionName=low {partition} PriorityTier=1 PreemptMode=requeue GraceTime={self.grace_time}",
            f"PartitionName=high {partition} PriorityTier=10 PreemptMode=off",
        ]
        return "\n".join(lines) + "\n"

    # --- jobs

    def run(self, *command: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run a SLURM client and return what it prints; its errors too, if failure is no error (``check=False``)."""
        result = subprocess.run(
            [*self._enter_controller(), *command],
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

    def wait_for_output(self, job: int | str, text: str, timeout: float = 30) -> str:
        """Wait until the job has printed ``text``, and return all that it has printed."""
        self.wait_until(lambda: text in self.output(job), job, timeout, f"never printed {text!r}")
        return self.output(job)

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

    def cancel(self, job: int | str) -> None:
        self.run("scancel", str(job))

    def requeue(self, job: int | str) -> None:
        """It starts again after 6 s; before that, its nodes would take it for the run that has just been ended."""
        self.run("scontrol", "requeue", str(job))

    def limit_time(self, job: int | str, minutes: int) -> None:
        self.run("scontrol", "update", f"jobid={job}", f"timelimit={minutes}")

    def processes(self, job: int, rank: int | None = None, node: str | None = None) -> list[int]:
        """Ids of the tasks that srun has started, without the processes they have started themselves."""
        own = dict(self._own_processes())
        return sorted(
            process
            for process, variables in own.items()
            if _is_task(variables, job, rank, node) and not _is_task(own.get(find_parent(process), {}), job, rank, node)
        )

    # --- nodes and daemons

    def node_state(self, node: str) -> str:
        """As sinfo says it: "idle", "alloc", "down"; with a star if the node does not answer."""
        return self.run(
            "sinfo", "--noheader", "--partition=main", f"--nodes={node}", "--format=%t", check=False
        ).strip()

    def kill_slurmd(self, node: str) -> None:
        """The tasks of the node go on without it."""
        self._daemons[node].kill()

    def start_slurmd(self, node: str) -> None:
        self._daemons[node].start()

    def wait_until_saved(self, job: int | str) -> None:
        """Return when slurmctld has written down what it knows of a job: within 5 s, and a crash forgets the rest."""
        mark = secrets.token_hex(8)
        self.run("scontrol", "update", f"jobid={job}", f"comment={mark}")
        path = self.folder / "slurmctld" / "job_state"

        def is_saved() -> bool:
            with contextlib.suppress(FileNotFoundError):  # for moments, while slurmctld puts the next in its place
                return mark.encode() in path.read_bytes()
            return False

        self.wait_until(is_saved, job, 10, "was not saved")

    def kill_slurmctld(self) -> None:
        self._daemons["slurmctld"].kill()

    def start_slurmctld(self) -> None:
        """Start it again; return when it answers."""
        self._daemons["slurmctld"].start()
        if not is_true_within(30, lambda: "is UP" in self.run("scontrol", "ping", check=False)):
            raise RuntimeError(f"slurmctld did not answer after 30 s.\n{self._tails()}")

    def _tails(self) -> str:
        """The last lines of all logs."""
        logs = [daemon.log for daemon in self._daemons.values() if daemon.log.exists()]
        texts = [(log.name, log.read_text(errors="replace").splitlines()[-15:]) for log in logs]
        return "\n".join(line for name, lines in texts for line in [f"--- {name}", *lines])


def _make_folder() -> Path:
    """A short path: SLURM appends to it, and a Unix socket's path must not exceed 107 characters."""
    parent = next((parent for parent in ("/tmp", "/var/tmp") if os.access(parent, os.W_OK | os.X_OK)), None)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="lv"))
    folder.chmod(0o711)  # munged wants its socket to be reachable
    return folder


def _is_task(variables: Mapping[str, str], job: int, rank: int | None, node: str | None) -> bool:
    wanted = {"SLURM_JOB_ID": str(job)}
    wanted |= {} if rank is None else {"SLURM_PROCID": str(rank)}
    wanted |= {} if node is None else {"SLURMD_NODENAME": node}
    # the batch script has a SLURM_PROCID as well
    return "SLURM_STEP_ID" in variables and all(variables.get(name) == value for name, value in wanted.items())
