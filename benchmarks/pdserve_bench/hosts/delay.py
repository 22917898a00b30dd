"""`delay.py NEAR FAR SECONDS`: forward frames between two interfaces with a delay, until stdin closes."""

import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from select import select

_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_ALL = 3
_LARGEST = 10 + 14 + 65535
"""Bytes of the largest frame: with offloading, one frame holds several TCP segments."""


def _open(interface: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    found.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    found.bind((interface, _ALL))
    return found


def _pass_on(source: socket.socket, sink: socket.socket, delay: float) -> None:
    late: deque[tuple[float, bytes]] = deque()
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        if select([source], [], [], wait)[0]:
            frame, address = source.recvfrom(_LARGEST)
            if address[2] != socket.PACKET_OUTGOING:
                late.append((time.monotonic() + delay, frame))
        while late and late[0][0] <= time.monotonic():
            with suppress(OSError):  # the link is down
                sink.send(late.popleft()[1])


def main() -> None:
    near, far = _open(sys.argv[1]), _open(sys.argv[2])
    print("ready", flush=True)
    for way in ((near, far), (far, near)):
        threading.Thread(target=_pass_on, args=(*way, float(sys.argv[3])), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
