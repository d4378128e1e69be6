"""The same cluster with a machine for each node, as far as namespaces go: its network, host name and processes.

So a node can lose its cable or its power, which is not the same as losing a process: nobody says goodbye. It needs
the rights to make namespaces and networks. Files are shared among the nodes, except for /dev/shm and /etc/hosts.
"""

import shutil
import subprocess
from pathlib import Path
from typing import IO

from slurm.cluster import Cluster, find_parent, is_running, is_true_within

_CONTROLLER, _NETWORK = "ctl", "10.99.0"  # known inside of the namespaces only
_UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def lacks_namespaces() -> str:
    """Why no machines can be made here; empty if they can."""
    for program in ("ip", "nsenter", "unshare", "mount", "hostname"):
        if not shutil.which(program):
            return f"{program} is not installed"
    bridge = [*_UNSHARE, "ip", "link", "add", "bridge0", "type", "bridge"]
    result = subprocess.run(bridge, capture_output=True, text=True)
    return f"networks cannot be made here: {result.stderr.strip()}" if result.returncode else ""


class Machine:
    """Namespaces that exist as long as the one process that holds them, and end all other processes in them with it.

    Args:
        name: Host name.
        hosts: File that takes the place of /etc/hosts.
    """

    def __init__(self, name: str, hosts: Path) -> None:
        # the child is the init process of its namespace: a signal that it ignores makes the kernel bury the orphans
        init = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            *_UNSHARE,
            "sh",
            "-c",
            "trap '' CHLD; echo ready; exec sleep infinity",
        ]
        self._init = 0
        self._holder: subprocess.Popen[bytes] = subprocess.Popen(
            init, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        output: IO[bytes] | None = self._holder.stdout
        if output is None or output.readline() != b"ready\n":
            self.end()
            raise RuntimeError(f"the namespaces of {name} could not be made.")
        processes = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
        self._init = next(process for process in processes if find_parent(process) == self.holder)
        self.run("hostname", name)
        self.run("mount", "--bind", str(hosts), "/etc/hosts")
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.ip("link", "set", "lo", "up")

    @property
    def entrance(self) -> list[str]:
        """What to put before a command that shall run in here."""
        process = self._holder.pid
        namespaces = ["--net", "--uts", "--mount", f"--pid=/proc/{process}/ns/pid_for_children"]
        return ["nsenter", f"--target={process}", *namespaces, f"--wd={Path.cwd()}", "--"]

    @property
    def holder(self) -> int:
        """Id of the process that other commands can name these namespaces by."""
        return self._holder.pid

    def run(self, *command: str) -> None:
        subprocess.run([*self.entrance, *command], check=True)

    def ip(self, *arguments: str) -> None:
        """Change the network, from the process namespace that is ours: a cable is given to a holder by its id."""
        subprocess.run(["nsenter", f"--target={self.holder}", "--net", "--", "ip", *arguments], check=True)

    def end(self) -> None:
        """Return when all processes in here have ended, for which their init process waits."""
        self._holder.kill()
        self._holder.wait()
        is_true_within(10, lambda: not is_running(self._init))
        if self._holder.stdout is not None:
            self._holder.stdout.close()


class NamespaceCluster(Cluster):
    """A cluster whose nodes can be unplugged and switched off; its arguments are those of ``Cluster``."""

    controller_host = _CONTROLLER

    # --- faults

    def unplug(self, node: str) -> None:
        """Pull the network cable: packets vanish, no connection is closed."""
        self._controller.ip("link", "set", node, "down")

    def plug(self, node: str) -> None:
        self._controller.ip("link", "set", node, "up")

    def power_off(self, node: str) -> None:
        """All processes of the node end at once and no other node hears of it."""
        # the cable is destroyed: farewells that the kernel still wants to deliver would otherwise keep it for minutes
        self._controller.ip("link", "delete", node)
        self._machines.pop(node).end()
        self.kill_slurmd(node)

    def power_on(self, node: str) -> None:
        self._add_machine(node)
        self._add_daemon(node, self._enter_node(node), "slurmd", "-D", "-N", node)
        self.start_slurmd(node)

    # --- the network

    def _add_network(self) -> None:
        self._machines: dict[str, Machine] = {}
        self._controller_address = f"{_NETWORK}.1"
        self._addresses = {node: f"{_NETWORK}.{number}" for number, node in enumerate(self.nodes, start=11)}
        names = {_CONTROLLER: self._controller_address} | self._addresses
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        self._hosts.write_text("\n".join(lines) + "\n")
        self._controller = self._machines[_CONTROLLER] = Machine(_CONTROLLER, self._hosts)
        self._controller.ip("link", "add", "bridge", "type", "bridge")
        self._controller.ip("address", "add", f"{self._controller_address}/24", "dev", "bridge")
        self._controller.ip("link", "set", "bridge", "up")
        for node in self.nodes:
            self._add_machine(node)

    def _add_machine(self, node: str) -> None:
        machine = self._machines[node] = Machine(node, self._hosts)
        # the cable, from the bridge to the node; the end at the bridge has the node's name
        cable = ["link", "add", node, "type", "veth", "peer", "name", "eth0", "netns"]
        self._controller.ip(*cable, str(machine.holder))
        self._controller.ip("link", "set", node, "master", "bridge", "up")
        machine.ip("address", "add", f"{self._addresses[node]}/24", "dev", "eth0")
        machine.ip("link", "set", "eth0", "up")

    def _remove_network(self) -> None:
        while self._machines:
            self._machines.popitem()[1].end()

    def _enter_controller(self) -> list[str]:
        return self._controller.entrance

    def _enter_node(self, node: str) -> list[str]:
        return self._machines[node].entrance

    @property
    def _hosts(self) -> Path:
        return self.folder / "hosts"
