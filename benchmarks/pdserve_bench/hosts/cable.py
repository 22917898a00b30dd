"""A network link between a host and the bridge that can be cut, slow, lossy or limited. Loss is a BPF filter at both
ends, because not every kernel has netem; delay is a process that forwards the frames."""

import subprocess
import sys
from pathlib import Path

from pdserve.util.errors import Unavailable

_RANDOM = 0xFFFFF038
"""Offset of a classic BPF load that returns a random number (SKF_AD_RANDOM)."""
_DROP, _PASS = 2, 0


def run(line: str) -> None:
    """Raises Unavailable with the command's error."""
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{line}: {done.stderr.strip() or done.returncode}")


class Cable:
    """From interface `name` at the bridge to eth0 in the namespaces of process `pid`."""

    def __init__(self, name: str, pid: int, address: str, subnet: str, bridge: str) -> None:
        self._name, self._bridge = name, bridge
        self._inside = f"nsenter --target {pid} --net"
        self._delayer: subprocess.Popen[bytes] | None = None
        hardware = "02:77:00:00:00:{:02x}".format(int(address.rpartition(".")[2]))  # the same after a restart
        run(f"ip link add {name} type veth peer name eth0 address {hardware} netns {pid}")
        run(f"ip link set {name} master {bridge} up")
        run(f"{self._inside} ip addr add {address}/24 dev eth0")
        run(f"{self._inside} ip link set eth0 up")
        run(f"{self._inside} ip route add default via {subnet}.1")

    def cut(self) -> None:
        """Drop all frames; TCP connections stay open."""
        run(f"ip link set {self._name} down")

    def mend(self) -> None:
        run(f"ip link set {self._name} up")

    def remove(self) -> None:
        self._stop_delaying()
        subprocess.run(["ip", "link", "del", self._name], capture_output=True, check=False)

    def limit(self, rate: str = "", loss: float = 0.0, delay: float = 0.0) -> None:
        """Limit both directions: `rate` as in tc (1gbit), `loss` as share, `delay` in seconds. Lifts earlier limits."""
        for where, device in (("", self._name), (f"{self._inside} ", "eth0")):
            self._clear(where, device)
            if rate:
                run(f"{where}tc qdisc add dev {device} root tbf rate {rate} burst 256kb latency 50ms")
            if loss:
                self._lose(where, device, loss)
        self._stop_delaying()
        if delay:
            self._delay(delay)

    def _clear(self, where: str, device: str) -> None:
        for kind in ("root", "clsact"):
            subprocess.run(
                f"{where}tc qdisc del dev {device} {kind}".split(), capture_output=True, check=False
            )
        run(f"{where}ip link set {device} gso_max_segs 65535")

    def _lose(self, where: str, device: str, share: float) -> None:
        """Drop a share of the device's incoming frames. Segmentation offload is off, so that frames are as
        large as on a wire."""
        passes = min(2**32 - 1, round((1 - share) * 2**32))
        program = f"4,32 0 0 {_RANDOM},53 0 1 {passes},6 0 0 {_DROP},6 0 0 {_PASS}"
        run(f"{where}ip link set {device} gso_max_segs 1")
        run(f"{where}tc qdisc add dev {device} clsact")
        line = f"{where}tc filter add dev {device} ingress bpf da bytecode".split()
        done = subprocess.run([*line, program], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"tc filter: {done.stderr.strip()}")

    def _delay(self, seconds: float) -> None:
        """Forward the frames through a process between this end and the bridge."""
        near, far = f"{self._name}-near", f"{self._name}-far"
        run(f"ip link add {near} type veth peer name {far}")
        run(f"ip link set {near} up")
        run(f"ip link set {far} master {self._bridge} up")
        run(f"ip link set {self._name} nomaster")
        command = [sys.executable, str(Path(__file__).with_name("delay.py")), self._name, near, str(seconds)]
        self._delayer = subprocess.Popen(
            command, process_group=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._delayer.stdout
        if not self._delayer.stdout.readline():
            raise Unavailable("frames cannot be delayed here: no raw sockets")

    def _stop_delaying(self) -> None:
        if self._delayer:
            self._delayer.kill()
            self._delayer.communicate()
            self._delayer = None
            run(f"ip link del {self._name}-near")
            run(f"ip link set {self._name} master {self._bridge}")
