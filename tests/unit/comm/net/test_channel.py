"""Listeners close connections that do not prove the job's secret, and log them in one line."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import socket
import ssl
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.launch import SECRET_FILE, TLS
from deepseek_zero.comm.net import channel, tls
from deepseek_zero.comm.net.channel import (
    Hello,
    Listener,
    Refused,
    Role,
    ServerHandshake,
    dial,
    introduce,
)
from deepseek_zero.comm.net.tls import TlsSocket

SECRET, OTHER = b"s" * 32, b"o" * 32
HELLO = Hello(Role.DATA, 3, 0)
PATIENCE = 20.0  # in seconds; the test process may be suspended for a while
Admitted = SimpleQueue[tuple[socket.socket, int]]


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Listener, Admitted]]:
    """Yield rank 0's listener and the connections that it accepted."""
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 10 * PATIENCE)
    yield from opened_door()


def opened_door() -> Iterator[tuple[Listener, Admitted]]:
    found, admitted = Listener("127.0.0.1", SECRET, 0), Admitted()
    found.admit(Role.DATA, lambda connection, rank: admitted.put((connection, rank)))
    yield found, admitted
    found.close()
    while not admitted.empty():
        admitted.get()[0].close()


def is_closed(connection: socket.socket, seconds: float) -> bool:
    """Return whether the other end closes the connection within `seconds`."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 12):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_a_peer_with_the_secret_is_accepted_and_its_next_message_is_not_lost(
    listener: tuple[Listener, Admitted],
) -> None:
    with dial(listener[0].address, PATIENCE) as connection:
        introduce(connection, SECRET, HELLO)
        connection.sendall(b"data")
        inside, rank = listener[1].get(timeout=PATIENCE)
        with inside:
            inside.settimeout(PATIENCE)
            assert (rank, inside.recv(10)) == (3, b"data")
    assert listener[0].rejected == 0


def test_a_proof_may_begin_with_any_byte(
    listener: tuple[Listener, Admitted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener detects TLS by the first byte; it once mistook 1 of 128 proofs for TLS."""
    prove = channel._proof
    for first in range(256):
        monkeypatch.setattr(
            channel, "_proof", lambda *said, byte=first: bytes([byte]) + prove(*said)[1:]
        )
        with dial(listener[0].address, PATIENCE) as connection:
            introduce(connection, SECRET, HELLO)
            listener[1].get(timeout=PATIENCE)[0].close()
    assert listener[0].rejected == 0


def test_both_ends_refuse_another_secret(listener: tuple[Listener, Admitted]) -> None:
    with (
        dial(listener[0].address, PATIENCE) as connection,
        pytest.raises(Refused, match="does not have the job's secret"),
    ):
        introduce(connection, OTHER, HELLO)
    server_handshake = ServerHandshake(SECRET, 0)
    server_handshake.take(channel._HELLO.pack(channel._MAGIC, Role.DATA, 3, 0, bytes(32)))
    with pytest.raises(Refused, match="did not prove"):
        server_handshake.take(secrets.token_bytes(server_handshake.needs))
    assert server_handshake.hello is None
    assert listener[1].empty()


def test_a_replayed_handshake_is_rejected() -> None:
    hello, server_handshake = (
        channel._HELLO.pack(channel._MAGIC, Role.DATA, 3, 0, secrets.token_bytes(32)),
        ServerHandshake(SECRET, 0),
    )
    proof = channel._proof(SECRET, b"dialer", hello + server_handshake.take(hello))
    server_handshake.take(proof)
    assert server_handshake.hello == HELLO, "it was good once"
    again = ServerHandshake(SECRET, 0)
    again.take(hello)
    with pytest.raises(Refused):
        again.take(proof)


def test_a_listeners_proof_is_not_accepted_from_a_client() -> None:
    server_handshake = ServerHandshake(SECRET, 0)
    challenge = server_handshake.take(
        channel._HELLO.pack(channel._MAGIC, Role.DATA, 3, 0, bytes(32))
    )
    with pytest.raises(Refused):
        server_handshake.take(challenge[-32:])


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b" " * 100,
        struct.pack("<Q", 1 << 30) * 20,  # a large length for protocols with a length prefix
        channel._HELLO.pack(b"dszero\x00\x02", Role.DATA, 3, 0, bytes(32)),  # another version
        channel._HELLO.pack(channel._MAGIC, Role.DATA, 3, 7, bytes(32)),  # for another rank
        channel._HELLO.pack(channel._MAGIC, 9, 3, 0, bytes(32)),  # unknown role
    ],
)
def test_invalid_data_are_rejected_immediately(
    listener: tuple[Listener, Admitted], said: bytes
) -> None:
    with dial(listener[0].address, PATIENCE) as connection:
        connection.sendall(said)
        assert is_closed(connection, PATIENCE), "long before the handshake's time is over"
    assert (listener[0].rejected, listener[1].empty()) == (1, True)


def test_a_thousand_half_open_connections_do_not_block_new_ones(
    listener: tuple[Listener, Admitted],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "MOST_PENDING", 64)
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 2.5)  # also limits the valid handshake
    silent = [dial(listener[0].address, PATIENCE) for _ in range(1000)]
    began = time.monotonic()
    with dial(listener[0].address, PATIENCE) as connection:
        introduce(connection, SECRET, HELLO)
        inside, rank = listener[1].get(timeout=PATIENCE)
        inside.close()
        assert rank == 3
    assert all(is_closed(each, max(0.01, began + PATIENCE - time.monotonic())) for each in silent)
    for each in silent:
        each.close()
    assert listener[0].rejected == 1000
    assert (
        len([line for line in caplog.messages if "closed a connection from 127.0.0.1" in line]) == 1
    ), "one line"


def test_a_listener_that_is_no_rank_of_the_job_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        dial(listener.getsockname(), PATIENCE) as connection,
    ):
        stranger, _ = listener.accept()
        with stranger, pytest.raises(Refused, match="not rank 0"):
            stranger.sendall(b"220 mail ready".ljust(channel._CHALLENGE.size))
            introduce(connection, SECRET, HELLO)


def test_a_listener_binds_to_its_address_and_port_range_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with pytest.raises(UsageError, match=r"(?s)all 1 ports.*--ports"):
            Listener("127.0.0.1", SECRET, 0, range(first, first + 1))
        listener = Listener("127.0.0.1", SECRET, 0, range(first, first + 20))
        assert listener.address[1] in range(first + 1, first + 20)
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            dial(listener.address, PATIENCE)


def test_ports_are_read_or_refused_by_name() -> None:
    assert (channel.parse_ports("29600-29602"), channel.parse_ports("7")) == (
        range(29600, 29603),
        range(7, 8),
    )
    for wrong in ("", "a", "5-3", "0-9", "1-70000"):
        with pytest.raises(UsageError, match="is not a range of ports"):
            channel.parse_ports(wrong)


def write(path: Path, content: bytes, mode: int) -> Callable[[], bytes | None]:
    path.write_bytes(content)
    path.chmod(mode)
    return channel.read_secret


def test_a_secret_is_32_bytes_that_others_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    monkeypatch.delenv(SECRET_FILE, raising=False)
    assert channel.read_secret() is None
    monkeypatch.setenv(SECRET_FILE, str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        channel.read_secret()
    assert write(path, SECRET, 0o600)() == SECRET
    for mode in (0o644, 0o440):
        with pytest.raises(UsageError, match=r"(?s)other users can open.*defaultMode: 0400"):
            write(path, SECRET, mode)()
    for content in (b"", SECRET[:-1], SECRET + b"\n"):
        with pytest.raises(UsageError, match="does not have 32 bytes"):
            write(path, content, 0o600)()


def test_a_secret_is_read_through_symbolic_links_as_in_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "..2026_01_01"
    version.mkdir()
    (version / "secret").write_bytes(SECRET)
    (version / "secret").chmod(0o400)
    (tmp_path / "..data").symlink_to(version.name)
    (tmp_path / "secret").symlink_to("..data/secret")
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "secret"))
    assert channel.read_secret() == SECRET


def test_a_secret_of_another_user_is_refused_and_roots_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, me = tmp_path / "secret", os.geteuid()
    monkeypatch.setenv(SECRET_FILE, str(path))
    read = write(path, SECRET, 0o600)
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me == 0:
        assert read() == SECRET
        os.chown(path, me + 2, -1)
    with pytest.raises(UsageError, match="a file of another user"):
        read()


def test_a_forked_child_does_not_keep_the_listener_open() -> None:
    listener = Listener("127.0.0.1", SECRET, 0)
    begun, begins = os.pipe()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begins, b"!")  # the at-fork handlers of the child have run
        os.close(writer)
        os.read(reader, 1)  # blocks until the parent closes the pipe
        os._exit(0)
    os.close(begins)
    try:
        assert os.read(begun, 1)
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            dial(listener.address, PATIENCE).close()
    finally:
        for end in (begun, reader, writer):
            os.close(end)
        os.waitpid(child, 0)


# -- TLS (comm/net/tls.py)


@pytest.fixture
def tls_door(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Listener, Admitted]]:
    monkeypatch.setenv(TLS, "1")
    yield from opened_door()


def test_tls_connections_require_the_secret(
    tls_door: tuple[Listener, Admitted],
) -> None:
    found, admitted = tls_door
    with introduce(dial(found.address, PATIENCE), SECRET, HELLO) as connection:
        assert isinstance(connection, TlsSocket) and connection.version() == "TLSv1.3"
        connection.sendall(b"data")
        inside, rank = admitted.get(timeout=PATIENCE)
        with inside:
            inside.settimeout(PATIENCE)
            assert (rank, inside.recv(10)) == (3, b"data")
            inside.setblocking(False)
            with pytest.raises(BlockingIOError):
                inside.recv(1)
    assert found.rejected == 0
    with (
        dial(found.address, PATIENCE) as connection,
        pytest.raises(Refused, match="does not have the job's secret"),
    ):
        introduce(connection, OTHER, HELLO)
    with dial(found.address, PATIENCE) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        assert is_closed(connection, PATIENCE)
    assert admitted.empty()


def test_by_tls_a_connection_that_proves_nothing_is_closed(
    tls_door: tuple[Listener, Admitted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS, the encrypted socket replaces the dialed one, and only `introduce` can close it."""
    made: list[socket.socket] = []
    encrypted = channel._encrypted
    monkeypatch.setattr(
        channel, "_encrypted", lambda *given: made.append(encrypted(*given)) or made[0]
    )
    with pytest.raises(ConnectionError):
        introduce(dial(tls_door[0].address, PATIENCE), SECRET, Hello(Role.DATA, 3, to=5))
    assert made[0].fileno() == -1


@pytest.mark.parametrize("end", ["listener", "dialer"])
def test_a_connection_that_is_reset_before_tls_begins_is_closed(end: str) -> None:
    """The ssl module of Python 3.11 owns the socket by then and raises without closing it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = dial(listener.getsockname(), PATIENCE)
        accepted, _ = listener.accept()
    kept, other = (accepted, dialed) if end == "listener" else (dialed, accepted)
    # Closing this end then sends a reset.
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    descriptor = kept.fileno()
    with pytest.raises(ConnectionResetError, match="ended before TLS began"):
        getattr(tls.contexts(SECRET), end).wrap_socket(
            kept, server_side=end == "listener", do_handshake_on_connect=end == "dialer"
        )
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_connections_with_tls_on_one_end_only_fail_with_the_reason_on_both(
    listener: tuple[Listener, Admitted],
    tls_door: tuple[Listener, Admitted],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        dial(listener[0].address, PATIENCE) as connection,
        pytest.raises(Refused, match="does not use TLS: use --tls on"),
    ):
        introduce(connection, SECRET, HELLO)
    monkeypatch.setenv(TLS, "0")
    with (
        dial(tls_door[0].address, PATIENCE) as connection,
        pytest.raises(Refused, match="uses TLS: use --tls on"),
    ):
        introduce(connection, SECRET, HELLO)
    assert listener[1].empty() and tls_door[1].empty()
    assert "it uses TLS, but this job does not: use --tls on every host" in caplog.text
    assert (
        "127.0.0.1 to this job: it does not use TLS, but this job does: use --tls on every host"
        in caplog.text
    )


def test_a_jobs_certificate_has_the_same_bytes_in_every_process_and_package_version() -> None:
    """Each end accepts only these bytes, and hosts may have different versions of cryptography."""
    # RFC 8032, 7.1, TEST 3
    seed = bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")
    key, certificate = tls._key_and_certificate(seed)
    der = ssl.PEM_cert_to_DER_cert(certificate)
    # The certificate contains the public key.
    assert bytes.fromhex("fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025") in der
    assert seed in base64.b64decode("".join(key.splitlines()[1:-1]))
    assert (
        hashlib.sha256(der).hexdigest()
        == "b58e586a3e26acdb719deec4d66df0dba7de384eb95161fa815d45109a8ee747"
    )
    assert tls._key_and_certificate(seed) == (key, certificate)
    assert tls._key_and_certificate(bytes(32))[1] != certificate


def test_without_the_package_for_certificates_no_end_opens_and_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "cryptography.x509", raising=False)
    secret = secrets.token_bytes(32)  # the contexts of a new secret are not cached
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        monkeypatch.setenv(TLS, "1")
        with pytest.raises(UsageError, match=r"pip install cryptography"):
            Listener("127.0.0.1", secret, 0)
        with (
            dial(listener.getsockname(), PATIENCE) as connection,
            pytest.raises(UsageError, match=r"pip install cryptography"),
        ):
            introduce(connection, secret, HELLO)
        with listener.accept()[0] as accepted:
            accepted.settimeout(PATIENCE)
            assert accepted.recv(1) == b"", "nothing was sent as plain text"


def test_a_jobs_key_is_stored_in_an_unnamed_file_if_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contexts() -> tls.Contexts:
        return tls.contexts(secrets.token_bytes(32))  # contexts of a new secret are not cached

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nosuch"))
    if hasattr(os, "memfd_create"):
        assert contexts().listener.cert_store_stats()["x509"] == 1
        monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(FileNotFoundError):
        contexts()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert contexts().listener.cert_store_stats()["x509"] == 1
    assert not list(tmp_path.iterdir())
