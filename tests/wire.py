"""A connection between two sockets of one process that can break, stall and garble data."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from deepseek_zero.comm.net.channel import Address


@dataclass
class Wire:
    """A proxy to an address that can be damaged. garble: changes the data that passes."""

    to: Address
    garble: Callable[[bytes], bytes] = bytes
    silent: threading.Event = field(default_factory=threading.Event)
    passed: list[bytes] = field(default_factory=list)
    ends: list[socket.socket] = field(default_factory=list)
    connections: int = 0
    is_open: bool = True

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while self.is_open:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.to)
            except OSError:
                near.close()
                continue
            self.ends += [near, far]
            self.connections += 1  # `reset` breaks this connection from now on
            if not self.is_open:
                self.reset()
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                while self.silent.is_set():
                    time.sleep(0.01)
                self.passed.append(data)
                target.sendall(self.garble(data))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def reset(self) -> None:
        """Break every connection like a lost route: both ends get a reset and data in transit is
        lost.
        """
        for each in list(self.ends):
            with suppress(ValueError):
                self.ends.remove(each)
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self.is_open = False
        self.silent.clear()
        with suppress(OSError):
            # close() does not wake the thread in accept().
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
