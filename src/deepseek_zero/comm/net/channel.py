"""Authenticated connections between ranks: both ends prove that they hold the job's secret before a
byte of data.

    dialer                                  listener
    HELLO  magic, role, ranks, nonce   ->
                                       <-   CHALLENGE  magic, rank, nonce, proof of the listener
    PROOF  of the dialer               ->

A proof is HMAC-SHA256, with the job's secret, over its own end's name and everything said before;
the nonces are fresh, so that an old conversation proves nothing.  Every message has a fixed length,
so nothing that a stranger sends is allocated for.  A connection that has proven nothing within
HANDSHAKE_SECONDS is closed.  With DEEPSEEK_ZERO_TLS=1 it is all said within TLS (tls.py).
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
MOST_PENDING = 256  # connections that have proven nothing yet; beyond, the oldest is closed
_MAGIC = b"dszero\x00\x01"  # the last byte is the protocol's version
_HELLO = struct.Struct("!8sB3xII32s")
_CHALLENGE = struct.Struct("!8sI32s32s")
_PROOF_BYTES = 32
_TLS_RECORDS = (b"\x15", b"\x16")  # how TLS begins: with an alert, or a handshake
# Such an alert, which both kinds of dialers understand
_NO_COMMON_PROTOCOL = bytes.fromhex("15030300020246")
_BOTH_ENDS = "say --tls on every host, or nowhere"
BEAT_SECONDS = 1  # of kernels
NEVER = (1 << 31) - 1  # milliseconds, the most that a kernel takes
# The kernel's tcp_info: state, tcpi_unacked, tcpi_last_ack_recv in ms
_TCP_INFO = struct.Struct("=B23xI28xI")
_ESTABLISHED = 1

Address = tuple[str, int]


class Role(IntEnum):
    """What a connection is for."""

    RECORDER = 1  # the flight recorder's lines
    DATA = 2  # messages of collectives
    KNOCK = 3  # nothing but the question whether that rank still lives
    STORE = 5  # torch's store, and what launchers tell each other
    LIFE = 4  # nothing at all: the kernels of both ends ask each other whether they are there


class Refused(ConnectionError):
    """The other end is not who it should be: another program, another version, another secret."""


def read_secret() -> bytes | None:
    """Return the job's secret from the file that DEEPSEEK_ZERO_SECRET_FILE names; None without the
    variable.

    Raises `UsageError` if the file is missing, is not 32 bytes long, is another user's, or may be
    read by others.
    """
    path = os.environ.get(SECRET_FILE)
    if not path:
        return None
    fix = (
        f"write {SECRET_BYTES} random bytes into a file of mode 0600, the same on every host, and "
        "name it there."
    )
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(SECRET_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"the job's secret cannot be read: {error}.", f"{SECRET_FILE} names that file.", fix
        ) from None
    if len(secret) != SECRET_BYTES:
        raise UsageError(
            f"{SECRET_FILE} names a file that does not hold {SECRET_BYTES} bytes.", fix=fix
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{SECRET_FILE} names a file of another user (number {status.st_uid}).",
            "Who may write it chooses who joins the job.",
            fix,
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"{SECRET_FILE} names a file that other users may open (mode "
            f"{stat.S_IMODE(status.st_mode):04o}).",
            "Whoever reads it can join the job.",
            "chmod 600 that file (of a Kubernetes Secret, say defaultMode: 0400 in its volume); or "
            f"{fix}",
        )
    return secret


def warn_without_secret(address: Address, whose: str) -> None:
    """Warn once that a job has no secret, if other hosts can reach its port.

    whose: the processes that have none, in the plural.
    """
    host, port = address
    if not is_loopback(host):
        logger.warning(
            f"{whose} hold no secret: whoever reaches {host}:{port} or reads their network can "
            f"join them. Name a file of {SECRET_BYTES} random bytes, mode 0600, the same on every "
            f"host, in {SECRET_FILE}."
        )


def fingerprint(secret: bytes) -> str:
    """Return a text by which ranks compare their secrets without telling them."""
    return hmac.new(secret, b"fingerprint", hashlib.sha256).hexdigest()[:16]


class Hello(NamedTuple):
    """What a dialer says of itself. rank, to: of the dialer and of the rank that it wants, as the
    world counts them.
    """

    role: Role
    rank: int
    to: int


class ServerHandshake:
    """The answering side of one handshake, without input and output: bytes go in, bytes come out.

    needs: bytes it waits for now, exactly; 0 once `hello` is proven.
    """

    def __init__(self, secret: bytes, rank: int) -> None:
        self._secret = secret
        self._rank = rank
        self._said = b""
        self.needs = _HELLO.size
        self.hello: Hello | None = None  # once it is believed
        self._claimed: Hello | None = None

    @property
    def is_first(self) -> bool:
        """Whether it waits for the dialer's first words, by which protocols are told apart."""
        return self._claimed is None

    def take(self, data: bytes) -> bytes:
        """Take `needs` bytes and return what to send back; raise `Refused` if they are not what
        they should be.
        """
        if self._claimed is None:
            magic, role, rank, to, _ = _HELLO.unpack(data)
            if magic != _MAGIC or to != self._rank or role not in tuple(Role):
                raise Refused("it does not speak this protocol, or means another rank")
            self._claimed = Hello(Role(role), rank, to)
            self.needs = _PROOF_BYTES
            said = data + _MAGIC + struct.pack("!I", self._rank) + secrets.token_bytes(32)
            answer = said[_HELLO.size :] + _proof(self._secret, b"door", said)
            self._said = data + answer
            return answer
        if not hmac.compare_digest(data, _proof(self._secret, b"dialer", self._said)):
            raise Refused("it did not prove that it holds the job's secret")
        self.hello = self._claimed
        self.needs = 0
        return b""


def _proof(secret: bytes, end: bytes, said: bytes) -> bytes:
    return hmac.new(secret, end + said, hashlib.sha256).digest()


def introduce(connection: socket.socket, secret: bytes, hello: Hello) -> socket.socket:
    """Prove this end to a listener, and have the listener prove itself; return the connection to
    use from then on.

    Waits as long as the connection's own time limit says. Raises `Refused` if it is another's
    listener, OSError if the connection breaks; then it is closed.
    """
    if uses_tls():
        connection = _encrypted(connection, secret, hello.to)
    try:
        said = _HELLO.pack(_MAGIC, hello.role, hello.rank, hello.to, secrets.token_bytes(32))
        connection.sendall(said)
        answer = receive_exactly(connection, 1)
        if answer in _TLS_RECORDS:
            raise Refused(f"what listens there speaks TLS: {_BOTH_ENDS}")
        answer += receive_exactly(connection, _CHALLENGE.size - 1)
        magic, rank, _, proof = _CHALLENGE.unpack(answer)
        if magic != _MAGIC or rank != hello.to:
            raise Refused(f"what listens there is not rank {hello.to}")
        if not hmac.compare_digest(proof, _proof(secret, b"door", said + answer[:-_PROOF_BYTES])):
            raise Refused(f"what listens there as rank {hello.to} does not hold the job's secret")
        connection.sendall(_proof(secret, b"dialer", said + answer))
    except BaseException:
        connection.close()  # within TLS nobody else has it
        raise
    return connection


# What OpenSSL calls a first record that is none
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


def _encrypted(connection: socket.socket, secret: bytes, to: int) -> socket.socket:
    try:
        return tls.contexts(secret).dialer.wrap_socket(connection)
    except ssl.SSLCertVerificationError:
        raise Refused(f"what listens there as rank {to} does not hold the job's secret") from None
    except ssl.SSLError as error:
        if error.reason in (*_NO_TLS, "TLSV1_ALERT_PROTOCOL_VERSION"):
            raise Refused(f"what listens there speaks no TLS: {_BOTH_ENDS}") from None
        raise ConnectionResetError(errno.ECONNRESET, f"no TLS: {error}") from None


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes. Raises `ConnectionError` if the connection ends before. count: small,
    and never the other's to choose.
    """
    found = bytearray(count)
    view = memoryview(found)
    place = 0
    while place < count:
        got = connection.recv_into(view[place:])
        if not got:
            raise ConnectionResetError(
                errno.ECONNRESET, "the connection ended in the midst of a message"
            )
        place += got
    return bytes(found)


def dial(address: Address, seconds: float) -> socket.socket:
    """Return a connection to an address; OSError if there is none within so many seconds. Small
    messages leave at once.
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


def ask_for_life(connection: socket.socket) -> None:
    """Have the kernel ask the other end's every second whether it is there, over a connection that
    carries nothing.

    The other end's kernel answers, also for a process that is stopped. No silence ends the
    connection: how long one may last is not the kernel's to say, and one that ends in time leaves a
    connection that is heard again.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        times = {"KEEPIDLE": BEAT_SECONDS, "KEEPINTVL": BEAT_SECONDS, "USER_TIMEOUT": NEVER}
        for option, value in times.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)


def end_with_the_host(connection: socket.socket, seconds: float) -> None:
    """Have the kernel end a connection whose other host has answered nothing for so long, also
    where nothing is sent.

    seconds: inf: never.  Systems other than Linux do nothing here.
    """
    if sys.platform != "linux" or not math.isfinite(seconds):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 4),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def silence_of(connection: socket.socket) -> float | None:
    """Return for how many seconds the other end's host has answered nothing, on a connection that
    asks for life.

    None if the connection has ended, or if this system does not tell.
    """
    state, _, milliseconds = _info_of(connection)
    return milliseconds / 1000 if state == _ESTABLISHED else None


def has_unanswered(connection: socket.socket) -> bool:
    """Return whether the other end's kernel has not yet acknowledged all that was sent.

    Between two tries to send it again a kernel waits twice as long each time: after a silence of
    seconds it waits for seconds more, although the other end may long be heard again.
    """
    state, unanswered, _ = _info_of(connection)
    return state == _ESTABLISHED and unanswered > 0


def _info_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return the fields of `_TCP_INFO`; zeros of a connection that is closed, or if this system
    does not tell.
    """
    if sys.platform != "linux":
        return 0, 0, 0
    try:
        state, unanswered, milliseconds = _TCP_INFO.unpack(
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
    except (OSError, struct.error):  # closed
        return 0, 0, 0
    return state, unanswered, milliseconds


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listening_variables(interface: str | None, ports: str | None) -> dict[str, str]:
    """Return the variables that tell ranks of this host where to listen, gloo, which carries the
    start, included.

    interface: as `address_of` takes it; ports: as `parse_ports` does; None: nothing is said.
    Local.  Raises `UsageError` for what this host has not.
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
    """Return the ports that a text (29600-29700, or one number) names. Raises `UsageError` if it
    names none.
    """
    first, _, last = text.partition("-")
    with contextlib.suppress(ValueError):
        ports = range(int(first), int(last or first) + 1)
        if ports and ports[0] > 0 and ports[-1] <= 65_535:
            return ports
    raise UsageError(
        f"{text!r} names no ports.",
        "Ports are numbers from 1 to 65535.",
        "write them as 29600-29700.",
    )


@dataclass
class _Pending:
    origin: str
    server_handshake: ServerHandshake
    until: float
    handshake: Callable[[], None] | None = None  # of TLS, until it is done
    came: bytearray = field(default_factory=bytearray)


class Listener:
    """One listening socket of this rank, at one address, and a thread that lets in who proves the
    job's secret.

    admit, by role: is called on that thread with the connection, which does not block, and the rank
    that proved itself. A stranger costs a closed connection and, the first time, a line in the log.
    """

    def __init__(self, host: str, secret: bytes, rank: int, ports: Iterable[int] = (0,)) -> None:
        """ports: to choose from; 0 is any free one. Raises `UsageError` if all are taken."""
        self._secret = secret
        self._rank = rank
        self._tls = tls.contexts(secret).listener if uses_tls() else None
        self._listener = _listen(host, ports)
        self.address: Address = self._listener.getsockname()[:2]
        self._admit: dict[Role, Callable[[socket.socket, int], None]] = {}
        self._pending: dict[socket.socket, _Pending] = {}
        self._watched: dict[int, tuple[socket.socket, Callable[[], None]]] = {}
        self.strangers = 0  # connections that were closed because they proved nothing
        self._poll = select.poll()
        self._sockets: dict[int, socket.socket] = {self._listener.fileno(): self._listener}
        self._wake, self._waker = socket.socketpair()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        _OPEN.add(self)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="deepseek-zero-door")
        self._thread.start()

    def admit(self, role: Role, handler: Callable[[socket.socket, int], None]) -> None:
        """Let in connections of this role; none come in before."""
        self._admit[role] = handler

    def watch(self, connection: socket.socket, ready: Callable[[], None]) -> None:
        """Call `ready` on this thread whenever the connection has something to read. Only on this
        thread.

        The connection is the listener's to close when it closes.
        """
        self._watched[connection.fileno()] = connection, ready
        self._poll.register(connection, select.POLLIN)

    def unwatch(self, connection: socket.socket) -> None:
        """Close a connection that was watched. Only on this thread."""
        del self._watched[connection.fileno()]
        self._poll.unregister(connection)
        connection.close()

    def call(self, action: Callable[[], None], seconds: float) -> bool:
        """Run an action on the listener's thread; return whether it ended within `seconds`."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._calls.append(act)
        with contextlib.suppress(OSError):  # closed
            self._waker.send(b"\0")
        return done.wait(seconds)

    def close(self) -> None:
        """Stop listening, and close what is watched; other connections that were admitted stay."""
        self._is_closing = True
        with contextlib.suppress(OSError):  # closed before
            # Its end alone would not do: a child of this process may hold it, too
            self._waker.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _connections(self) -> list[socket.socket]:
        """Return all sockets that are this listener's to close, in this process or a child
        of it.
        """
        return [self._listener, *self._pending, *(watched for watched, _ in self._watched.values())]

    def _close_in_child(self) -> None:
        for connection in self._connections():
            connection.close()  # or it would look as if this rank still listened when it has ended

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                for descriptor, _ in self._poll.poll(self._poll_timeout()):
                    self._look_at(descriptor)
                self._close_overdue()
        finally:
            for connection in (self._wake, self._waker, *self._connections()):
                connection.close()

    def _poll_timeout(self) -> float | None:
        """Return milliseconds until the next connection is overdue."""
        if not self._pending:
            return None
        first = next(iter(self._pending.values()))  # they come in the order of their time limits
        return max(0.0, first.until - time.monotonic()) * 1000 + 1

    def _look_at(self, descriptor: int) -> None:
        if descriptor == self._wake.fileno():
            self._wake.recv(1)
            while self._calls:
                self._calls.popleft()()
        elif (watched := self._watched.get(descriptor)) is not None:
            watched[1]()
        elif (connection := self._sockets.get(descriptor)) is self._listener:
            self._accept()
        elif connection is not None:
            self._hear(connection)

    def _accept(self) -> None:
        try:
            connection, (origin, *_) = self._listener.accept()
        except OSError:  # it is gone again, or there are no descriptors left
            return
        connection.setblocking(False)
        handshake = None
        if self._tls is not None:
            try:
                secured = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            except OSError:  # it is gone again
                connection.close()
                return
            connection = secured
            handshake = secured.do_handshake
        if len(self._pending) >= MOST_PENDING:
            self._turn_away(next(iter(self._pending)), Refused("too many at once"))
        server_handshake = ServerHandshake(self._secret, self._rank)
        self._pending[connection] = _Pending(
            origin, server_handshake, time.monotonic() + HANDSHAKE_SECONDS, handshake
        )
        self._sockets[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _hear(self, connection: socket.socket) -> None:
        pending = self._pending[connection]
        try:
            if pending.handshake is not None:
                pending.handshake()
                pending.handshake = None
            data = connection.recv(pending.server_handshake.needs - len(pending.came))
            if not data:
                raise Refused("it went before it had proven anything")
            pending.came += data
            if (
                self._tls is None
                and pending.server_handshake.is_first
                and pending.came[:1] in _TLS_RECORDS
            ):
                raise _OtherProtocol("it speaks TLS, and this job does not")
            if len(pending.came) == pending.server_handshake.needs:
                answer = pending.server_handshake.take(bytes(pending.came))
                pending.came = bytearray()
                if answer and connection.send(answer) != len(answer):
                    raise Refused("it does not listen")
        except BlockingIOError:
            return
        except OSError as error:
            if (
                pending.handshake is not None
                and isinstance(error, ssl.SSLError)
                and error.reason in _NO_TLS
            ):
                error = _OtherProtocol("it speaks no TLS, and this job does")
            self._turn_away(connection, error)
            return
        hello = pending.server_handshake.hello
        if hello is not None:
            self._forget(connection)
            if (handler := self._admit.get(hello.role)) is None:
                connection.close()
                return
            _send_at_once(connection)
            handler(connection, hello.rank)

    def _close_overdue(self) -> None:
        now = time.monotonic()
        while self._pending:
            connection, pending = next(iter(self._pending.items()))
            if pending.until > now:
                return
            self._turn_away(
                connection, Refused(f"it proved nothing within {HANDSHAKE_SECONDS:g} s")
            )

    def _forget(self, connection: socket.socket) -> None:
        del self._pending[connection], self._sockets[connection.fileno()]
        self._poll.unregister(connection)

    def _turn_away(self, connection: socket.socket, reason: OSError) -> None:
        origin = self._pending[connection].origin
        self._forget(connection)
        self.strangers += 1
        if self.strangers == 1:
            logger.warning(
                f"closed a connection from {origin} to this job: {reason} (others will be closed "
                "in silence)"
            )
        # Which the dialer hears after this log, and may end at once
        if isinstance(reason, _OtherProtocol):
            _tell_no_common_protocol(connection)
        connection.close()


class _OtherProtocol(Refused):
    """One of the two ends alone speaks TLS."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: {_BOTH_ENDS}")


def _tell_no_common_protocol(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # past TLS, where the connection is by TLS
        socket.socket.send(connection, _NO_COMMON_PROTOCOL)
        # What stays unread would reset the connection, and the record with it
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
        f"all {tried} ports that this rank may listen at are taken at {host}.",
        "Each rank takes one.",
        "give --ports a wider range.",
    )


_OPEN: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_in_child() -> None:
    for listener in list(_OPEN):
        listener._close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
