"""Authenticated connections between ranks.

Both ends prove that they hold the job's secret before any data is sent::

    dialer                                  listener
    HELLO  magic, role, ranks, nonce   ->
                                       <-   CHALLENGE  magic, rank, nonce, proof of the listener
    PROOF  of the dialer               ->

A proof is HMAC-SHA256, keyed with the job's secret, over the name of its own end and all bytes
exchanged before. The nonces are fresh, so a recorded conversation proves nothing. Every message has
a fixed length, so a stranger cannot make this process allocate memory. A connection without a proof
is closed after HANDSHAKE_SECONDS. With DEEPSEEK_ZERO_TLS=1 the handshake runs within TLS
(`tls.py`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import math
import os
import secrets
import select
import socket
import ssl
import stat
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from ...base.errors import UsageError
from ...base.launch import GLOO_INTERFACE, INTERFACE, PORTS, SECRET_BYTES, SECRET_FILE, uses_tls
from ...base.log import logger
from ...base.network import address_of, interface_of, is_loopback
from . import tls

HANDSHAKE_SECONDS = 5.0
MOST_PENDING = 256  # Connections without a proof; beyond this number, the oldest is closed
_MAGIC = b"dszero\x00\x01"  # The last byte is the version of the protocol
_HELLO = struct.Struct("!8sB3xII32s")
_CHALLENGE = struct.Struct("!8sI32s32s")
_PROOF_BYTES = 32
_TLS_RECORDS = (b"\x15", b"\x16")  # The first byte of TLS: an alert or a handshake
# A TLS alert that both kinds of dialers understand
_NO_COMMON_PROTOCOL = bytes.fromhex("15030300020246")
_BOTH_ENDS = "use --tls on every host, or on none"
BEAT_SECONDS = 1  # Interval of the kernels' keep-alive probes
NEVER = (1 << 31) - 1  # Milliseconds, the maximum that a kernel accepts
# Fields of the kernel's tcp_info: state, tcpi_unacked, tcpi_last_ack_recv in ms
_TCP_INFO = struct.Struct("=B23xI28xI")
_ESTABLISHED = 1

Address = tuple[str, int]


class Role(IntEnum):
    """The purpose of a connection, which the dialer states in the handshake."""

    RECORDER = 1  # Lines of the flight recorder
    DATA = 2  # Messages of collectives
    PROBE = 3  # Checks only whether the rank is still alive
    STORE = 5  # torch's store, and messages between launchers
    KEEP_ALIVE = 4  # No messages: the kernels of both ends probe each other


class Refused(ConnectionError):
    """Raised if the other end is another program, another version, or has another secret."""


def read_secret() -> bytes | None:
    """Return the job's secret from the file that DEEPSEEK_ZERO_SECRET_FILE names.

    Return None if the variable is not set.

    Raises:
        UsageError: The file is missing, is not 32 bytes long, belongs to another user, or can be
            read by others.
    """
    path = os.environ.get(SECRET_FILE)
    if not path:
        return None
    fix = (
        f"write {SECRET_BYTES} random bytes into a file of mode 0600, the same on every host, and "
        "set the variable to its path."
    )
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(SECRET_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"the job's secret cannot be read: {error}.", f"{SECRET_FILE} is its path.", fix
        ) from None
    if len(secret) != SECRET_BYTES:
        raise UsageError(
            f"{SECRET_FILE} is a file that does not have {SECRET_BYTES} bytes.", fix=fix
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{SECRET_FILE} is a file of another user (number {status.st_uid}).",
            "A user who can write it decides who can join the job.",
            fix,
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"{SECRET_FILE} is a file that other users can open (mode "
            f"{stat.S_IMODE(status.st_mode):04o}).",
            "A user who can read it can join the job.",
            "chmod 600 that file (for a Kubernetes Secret, set defaultMode: 0400 in its volume); "
            "or "
            f"{fix}",
        )
    return secret


def warn_without_secret(address: Address, whose: str) -> None:
    """Warn once that a job has no secret, if other hosts can reach its port.

    Args:
        address: The address of the listener.
        whose: The processes without a secret, in the plural.
    """
    host, port = address
    if not is_loopback(host):
        logger.warning(
            f"{whose} have no secret: anyone who can reach {host}:{port} or read their network can "
            f"join them. Create a file of {SECRET_BYTES} random bytes, mode 0600, the same on "
            "every "
            f"host, and set {SECRET_FILE} to its path."
        )


def fingerprint(secret: bytes) -> str:
    """Return a digest of a secret, which ranks compare without revealing the secret."""
    return hmac.new(secret, b"fingerprint", hashlib.sha256).hexdigest()[:16]


class Hello(NamedTuple):
    """The identity that a dialer claims.

    Attributes:
        role: The purpose of the connection.
        rank: The world rank of the dialer.
        to: The world rank that it wants to reach.
    """

    role: Role
    rank: int
    to: int


class ServerHandshake:
    """The listener's side of one handshake, without I/O.

    Args:
        secret: Secret that all processes of the job hold, 32 bytes.
        rank: The world rank of the listener.

    Attributes:
        needs: The exact number of bytes that `take` expects next; 0 after a valid proof.
        hello: The identity of the dialer after a valid proof; None before.
    """

    def __init__(self, secret: bytes, rank: int) -> None:
        self._secret = secret
        self._rank = rank
        self._transcript = b""
        self.needs = _HELLO.size
        self.hello: Hello | None = None
        self._claimed: Hello | None = None

    @property
    def is_first(self) -> bool:
        """Return whether it waits for the dialer's first bytes, which identify the protocol."""
        return self._claimed is None

    def take(self, data: bytes) -> bytes:
        """Process `needs` bytes and return the answer to send.

        Returns:
            Bytes to send to the dialer, which may be empty.

        Raises:
            Refused: The bytes are not valid.
        """
        if self._claimed is None:
            magic, role, rank, to, _ = _HELLO.unpack(data)
            if magic != _MAGIC or to != self._rank or role not in tuple(Role):
                raise Refused("it uses another protocol, or expects another rank")
            self._claimed = Hello(Role(role), rank, to)
            self.needs = _PROOF_BYTES
            transcript = data + _MAGIC + struct.pack("!I", self._rank) + secrets.token_bytes(32)
            answer = transcript[_HELLO.size :] + _proof(self._secret, b"listener", transcript)
            self._transcript = data + answer
            return answer
        if not hmac.compare_digest(data, _proof(self._secret, b"dialer", self._transcript)):
            raise Refused("it did not prove that it has the job's secret")
        self.hello = self._claimed
        self.needs = 0
        return b""


def _proof(secret: bytes, end: bytes, transcript: bytes) -> bytes:
    return hmac.new(secret, end + transcript, hashlib.sha256).digest()


def introduce(connection: socket.socket, secret: bytes, hello: Hello) -> socket.socket:
    """Run the dialer's side of the handshake.

    The call waits as long as the connection's timeout. The connection is closed if an error is
    raised.

    Args:
        connection: A new connection to a listener.
        secret: Secret that all processes of the job hold, 32 bytes.
        hello: The identity of this end.

    Returns:
        The connection to use from now on, which may be a TLS connection.

    Raises:
        Refused: The listener belongs to another program or holds another secret.
        OSError: The connection broke.
    """
    if uses_tls():
        connection = _encrypted(connection, secret, hello.to)
    try:
        transcript = _HELLO.pack(_MAGIC, hello.role, hello.rank, hello.to, secrets.token_bytes(32))
        connection.sendall(transcript)
        answer = receive_exactly(connection, 1)
        if answer in _TLS_RECORDS:
            raise Refused(f"the listener uses TLS: {_BOTH_ENDS}")
        answer += receive_exactly(connection, _CHALLENGE.size - 1)
        magic, rank, _, proof = _CHALLENGE.unpack(answer)
        if magic != _MAGIC or rank != hello.to:
            raise Refused(f"the listener is not rank {hello.to}")
        if not hmac.compare_digest(
            proof, _proof(secret, b"listener", transcript + answer[:-_PROOF_BYTES])
        ):
            raise Refused(f"the listener of rank {hello.to} does not have the job's secret")
        connection.sendall(_proof(secret, b"dialer", transcript + answer))
    except BaseException:
        connection.close()  # With TLS, this is the only reference to the connection
        raise
    return connection


# OpenSSL's reasons for a first record that is not TLS
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


def _encrypted(connection: socket.socket, secret: bytes, to: int) -> socket.socket:
    try:
        return tls.contexts(secret).dialer.wrap_socket(connection)
    except ssl.SSLCertVerificationError:
        raise Refused(f"the listener of rank {to} does not have the job's secret") from None
    except ssl.SSLError as error:
        if error.reason in (*_NO_TLS, "TLSV1_ALERT_PROTOCOL_VERSION"):
            raise Refused(f"the listener does not use TLS: {_BOTH_ENDS}") from None
        raise ConnectionResetError(errno.ECONNRESET, f"no TLS: {error}") from None


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes.

    Args:
        connection: The connection to read.
        count: A small number that the other end cannot choose.

    Returns:
        Exactly `count` bytes.

    Raises:
        ConnectionError: The connection ended before.
    """
    found = bytearray(count)
    view = memoryview(found)
    place = 0
    while place < count:
        got = connection.recv_into(view[place:])
        if not got:
            raise ConnectionResetError(
                errno.ECONNRESET, "the connection ended in the middle of a message"
            )
        place += got
    return bytes(found)


def dial(address: Address, seconds: float) -> socket.socket:
    """Return a connection to an address, with TCP_NODELAY.

    Args:
        address: The address to connect to.
        seconds: Timeout of the attempt, and of later operations on the connection.

    Returns:
        The connected socket, which the caller must close.

    Raises:
        OSError: The attempt failed or timed out.
    """
    connection = socket.socket(_family(address[0]), socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    _send_at_once(connection)
    return connection


def _send_at_once(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def enable_keep_alive(connection: socket.socket) -> None:
    """Enable keep-alive probes every second on an idle connection.

    The other end's kernel answers, even for a stopped process. No silence closes the connection:
    the caller decides how long a silence may last. A connection that stays open reveals when the
    host answers again.
    """
    if sys.platform == "linux":
        _probe(connection, KEEPIDLE=BEAT_SECONDS, KEEPINTVL=BEAT_SECONDS, USER_TIMEOUT=NEVER)
    else:
        _probe(connection)


def _probe(connection: socket.socket, **options: int) -> None:
    """Enable keep-alive probes with these options of TCP, which are named without "TCP_"."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def end_with_the_host(connection: socket.socket, seconds: float) -> None:
    """Make the kernel close a connection whose host stopped answering.

    This works even if nothing is sent. On systems other than Linux the function does nothing.

    Args:
        connection: Connected TCP socket to configure.
        seconds: Seconds without an answer; inf means never.
    """
    if sys.platform == "linux" and math.isfinite(seconds):
        _probe(connection, KEEPIDLE=2, KEEPINTVL=2, KEEPCNT=4, USER_TIMEOUT=int(seconds * 1000))


def silence_of(connection: socket.socket) -> float | None:
    """Return the seconds since the other host's kernel last answered.

    The connection must have been passed to `enable_keep_alive`. Return None if the connection has
    ended, or if this system does not report the value.
    """
    state, _, milliseconds = _info_of(connection)
    return milliseconds / 1000 if state == _ESTABLISHED else None


def has_unanswered(connection: socket.socket) -> bool:
    """Return whether the other host has not yet acknowledged all sent data.

    A kernel doubles the pause before each retransmission. After a silence of some seconds it waits
    for seconds more, although the other end may already be reachable again.
    """
    state, unanswered, _ = _info_of(connection)
    return state == _ESTABLISHED and unanswered > 0


def _info_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return the fields of `_TCP_INFO`, or zeros if they are not available."""
    if sys.platform != "linux":
        return 0, 0, 0
    try:
        state, unanswered, milliseconds = _TCP_INFO.unpack(
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
    except (OSError, struct.error):  # Closed
        return 0, 0, 0
    return state, unanswered, milliseconds


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listening_variables(interface: str | None, ports: str | None) -> dict[str, str]:
    """Return the environment variables that define where ranks of this host listen.

    They include gloo's interface, because the first messages are sent with gloo.

    Args:
        interface: Name of a network interface, or an address of this host; None sets nothing.
        ports: A range such as 29600-29700, or a single port; None sets nothing.

    Returns:
        The values by name, for the environment of the ranks.

    Raises:
        UsageError: This host does not have the interface, or the ports are invalid.
    """
    found = {}
    if interface is not None:
        found[INTERFACE] = address = address_of(interface)
        found[GLOO_INTERFACE] = interface_of(address)
    if ports is not None:
        parse_ports(ports)
        found[PORTS] = ports
    return found


def parse_ports(text: str) -> range:
    """Return the ports that a text names, either 29600-29700 or a single number.

    Raises:
        UsageError: The text names no ports.
    """
    first, _, last = text.partition("-")
    with contextlib.suppress(ValueError):
        ports = range(int(first), int(last or first) + 1)
        if ports and ports[0] > 0 and ports[-1] <= 65_535:
            return ports
    raise UsageError(
        f"{text!r} is not a range of ports.",
        "Ports are numbers from 1 to 65535.",
        "write them as 29600-29700.",
    )


@dataclass
class _Pending:
    connection: socket.socket
    origin: str
    server_handshake: ServerHandshake
    until: float
    handshake: Callable[[], None] | None = None  # The TLS handshake, until it is done
    came: bytearray = field(default_factory=bytearray)


class Listener:
    """A listening socket and a thread that admits holders of the job's secret.

    Connections without a valid proof are closed. The first one is logged.

    Args:
        host: The address to listen at.
        secret: Secret that all processes of the job hold, 32 bytes.
        rank: The world rank of this process.
        ports: Ports to choose from; 0 is any free port.

    Attributes:
        address: The address and port of the socket.
        rejected: Number of connections that were closed without a valid proof.

    Raises:
        UsageError: All ports are in use.
    """

    def __init__(self, host: str, secret: bytes, rank: int, ports: Iterable[int] = (0,)) -> None:
        self._secret = secret
        self._rank = rank
        self._tls = tls.contexts(secret).listener if uses_tls() else None
        self._listener = _listen(host, ports)
        self.address: Address = self._listener.getsockname()[:2]
        self._admit: dict[Role, Callable[[socket.socket, int], None]] = {}
        # By descriptor, in the order of their deadlines
        self._pending: dict[int, _Pending] = {}
        self._watched: dict[int, tuple[socket.socket, Callable[[], None]]] = {}
        self.rejected = 0
        self._poll = select.poll()
        self._wake, self._waker = socket.socketpair()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        _OPEN.add(self)
        self._thread = threading.Thread(
            target=self._serve, daemon=True, name="deepseek-zero-listener"
        )
        self._thread.start()

    def admit(self, role: Role, handler: Callable[[socket.socket, int], None]) -> None:
        """Admit connections of this role; before this call they are closed.

        Args:
            role: The role of the connections.
            handler: Called on the listener's thread with the non-blocking connection and the rank
                of the other end.
        """
        self._admit[role] = handler

    def watch(self, connection: socket.socket, ready: Callable[[], None]) -> None:
        """Call `ready` on the listener's thread whenever a connection is readable.

        Call this only on the listener's thread. The connection is closed with the listener.

        Args:
            connection: Connection that `admit` passed to a handler.
            ready: Reads from the connection.
        """
        self._watched[connection.fileno()] = connection, ready
        self._poll.register(connection, select.POLLIN)

    def unwatch(self, connection: socket.socket) -> None:
        """Close a watched connection; call this only on the listener's thread."""
        del self._watched[connection.fileno()]
        self._poll.unregister(connection)
        connection.close()

    def call(self, action: Callable[[], None], seconds: float) -> bool:
        """Run an action on the listener's thread.

        Args:
            action: The function to call.
            seconds: Maximum time to wait for its end.

        Returns:
            Whether it ended in time.
        """
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._calls.append(act)
        with contextlib.suppress(OSError):  # closed
            self._waker.send(b"\0")
        return done.wait(seconds)

    def close(self) -> None:
        """Stop listening, and close watched connections.

        Other admitted connections stay open.
        """
        self._is_closing = True
        with contextlib.suppress(OSError):  # Closed before
            # Closing the socket would not wake the thread if a child process holds it, too
            self._waker.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def connections(self) -> list[socket.socket]:
        """Return all sockets that the listener must close, here or in a child process."""
        pending = [each.connection for each in self._pending.values()]
        return [self._listener, *pending, *(watched for watched, _ in self._watched.values())]

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                for descriptor, _ in self._poll.poll(self._poll_timeout()):
                    self._look_at(descriptor)
                self._close_overdue()
        finally:
            for connection in (self._wake, self._waker, *self.connections()):
                connection.close()

    def _poll_timeout(self) -> float | None:
        """Return the milliseconds until the next connection is overdue."""
        if not self._pending:
            return None
        first = next(iter(self._pending.values()))
        return max(0.0, first.until - time.monotonic()) * 1000 + 1

    def _look_at(self, descriptor: int) -> None:
        if descriptor == self._wake.fileno():
            self._wake.recv(1)
            while self._calls:
                self._calls.popleft()()
        elif descriptor == self._listener.fileno():
            self._accept()
        elif (watched := self._watched.get(descriptor)) is not None:
            watched[1]()
        elif (pending := self._pending.get(descriptor)) is not None:
            self._continue_handshake(pending)

    def _accept(self) -> None:
        try:
            connection, (origin, *_) = self._listener.accept()
        except OSError:  # the connection is gone again, or no descriptors are left
            return
        connection.setblocking(False)
        handshake = None
        if self._tls is not None:
            try:
                secured = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            except OSError:  # The connection is gone again
                connection.close()
                return
            connection = secured
            handshake = secured.do_handshake
        if len(self._pending) >= MOST_PENDING:
            self._turn_away(next(iter(self._pending.values())), Refused("too many at once"))
        server_handshake = ServerHandshake(self._secret, self._rank)
        until = time.monotonic() + HANDSHAKE_SECONDS
        self._pending[connection.fileno()] = _Pending(
            connection, origin, server_handshake, until, handshake
        )
        self._poll.register(connection, select.POLLIN)

    def _continue_handshake(self, pending: _Pending) -> None:
        connection = pending.connection
        server = pending.server_handshake
        try:
            if pending.handshake is not None:
                pending.handshake()
                pending.handshake = None
            data = connection.recv(server.needs - len(pending.came))
            if not data:
                raise Refused("it closed the connection before it authenticated")
            pending.came += data
            if self._tls is None and server.is_first and pending.came[:1] in _TLS_RECORDS:
                raise _OtherProtocol("it uses TLS, but this job does not")
            if len(pending.came) == server.needs:
                answer = server.take(bytes(pending.came))
                pending.came = bytearray()
                if answer and connection.send(answer) != len(answer):
                    raise Refused("it does not read")
        except BlockingIOError:
            return
        except OSError as error:
            is_in_tls = pending.handshake is not None and isinstance(error, ssl.SSLError)
            if is_in_tls and getattr(error, "reason", "") in _NO_TLS:
                error = _OtherProtocol("it does not use TLS, but this job does")
            self._turn_away(pending, error)
            return
        if server.hello is not None:
            self._forget(pending)
            handler = self._admit.get(server.hello.role)
            if handler is None:
                connection.close()
                return
            _send_at_once(connection)
            handler(connection, server.hello.rank)

    def _close_overdue(self) -> None:
        now = time.monotonic()
        refusal = Refused(f"it did not authenticate within {HANDSHAKE_SECONDS:g} s")
        for pending in [each for each in self._pending.values() if each.until <= now]:
            self._turn_away(pending, refusal)

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.connection.fileno()]
        self._poll.unregister(pending.connection)

    def _turn_away(self, pending: _Pending, reason: OSError) -> None:
        self._forget(pending)
        self.rejected += 1
        if self.rejected == 1:
            logger.warning(
                f"closed a connection from {pending.origin} to this job: {reason} (later ones will "
                "be closed without a warning)"
            )
        # The dialer may exit when it receives this, so send it after the log line
        if isinstance(reason, _OtherProtocol):
            _send_protocol_alert(pending.connection)
        pending.connection.close()


class _OtherProtocol(Refused):
    """Only one of the two ends uses TLS."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: {_BOTH_ENDS}")


def _send_protocol_alert(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # Bypass TLS if this connection uses it
        socket.socket.send(connection, _NO_COMMON_PROTOCOL)
        # Unread data would reset the connection and discard the alert
        socket.socket.recv(connection, 1 << 12)


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    tried = 0
    for port in ports:
        listener = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            tried += 1
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            listener.setblocking(False)
            return listener
    raise UsageError(
        f"all {tried} ports at which this rank may listen are in use at {host}.",
        "Each rank needs one.",
        "set --ports to a wider range.",
    )


_OPEN: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_in_child() -> None:
    for listener in list(_OPEN):
        # An open copy in a child would make this rank seem to listen after it exited
        for connection in listener.connections():
            connection.close()


os.register_at_fork(after_in_child=_close_in_child)
