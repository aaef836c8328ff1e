"""TLS 1.3 for a job's own connections, with a certificate made from its secret.

The job's secret yields an Ed25519 key, and the key signs its own certificate. The certificate is
the same in every process, byte for byte. Each end presents it and accepts no other, so only a
process that holds the secret can complete a handshake. No certificate is distributed or renewed.
The proofs of `channel.py` are exchanged within TLS, too.

Python's ssl cannot create certificates. The optional package `cryptography` (the extra `tls`)
creates this one.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import hmac
import importlib
import os
import ssl
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ...base.errors import UsageError
from ...base.launch import TLS

RECORD_BYTES = 1 << 14  # Maximum bytes of one TLS record


class Contexts(NamedTuple):
    """The TLS contexts of one job.

    Attributes:
        listener: For accepted connections.
        dialer: For outgoing connections.
    """

    listener: ssl.SSLContext
    dialer: ssl.SSLContext


def _like_a_plain_socket(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that raises BlockingIOError where a plain socket does."""

    @functools.wraps(method)
    def wrapped(*args: Any) -> Any:
        try:
            return method(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    return wrapped


class TlsSocket(ssl.SSLSocket):
    """A TLS connection that behaves like a non-blocking plain socket.

    It raises BlockingIOError where a plain socket does, and writes several buffers at once.
    """

    recv_into = _like_a_plain_socket(ssl.SSLSocket.recv_into)
    send = _like_a_plain_socket(ssl.SSLSocket.send)
    do_handshake = _like_a_plain_socket(ssl.SSLSocket.do_handshake)

    @_like_a_plain_socket
    def recv(self, *args: Any) -> bytes:
        """Receive bytes; raise BlockingIOError if there are none.

        Raises:
            ConnectionResetError: The connection ended before TLS began.
            BlockingIOError: No data is available.
        """
        # The ssl module calls this on a connection that ended before TLS began, and would leave it
        # open
        if self.version() is None:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended before TLS began")
        return super().recv(*args)

    def sendmsg(self, buffers: Iterable[bytes | memoryview], *_: Any) -> int:  # type: ignore[override]
        """Send the first buffers that fit into one record, and return how many bytes were sent."""
        found: list[bytes | memoryview] = []
        size = 0
        for buffer in buffers:
            if found and size + len(buffer) > RECORD_BYTES:
                break
            found.append(buffer)
            size += len(buffer)
        data = found[0] if len(found) == 1 else b"".join(found)
        return int(self.send(data))


def require_cryptography() -> None:
    """Raise `UsageError` if the package that creates certificates cannot be imported."""
    try:
        importlib.import_module("cryptography.x509")
    except ImportError as error:
        raise UsageError(
            f"TLS is enabled, but the package cryptography cannot be imported: {error}.",
            f"--tls, or {TLS}=1, encrypts messages between hosts; cryptography creates the "
            "certificate.",
            "install it on every host: pip install cryptography; or remove --tls.",
        ) from error


@functools.cache
def contexts(secret: bytes) -> Contexts:
    """Return the TLS contexts of a job.

    Args:
        secret: The 32 bytes that all processes of the job hold.

    Raises:
        UsageError: The package cryptography is missing.
    """
    require_cryptography()
    key, certificate = _key_and_certificate(hmac.new(secret, b"tls key", hashlib.sha256).digest())
    listener = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    dialer = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with _file_of(key + certificate) as path:
        for context in (listener, dialer):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # The key is the identity, on any host
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(path)
            context.load_verify_locations(cadata=certificate)
            context.sslsocket_class = TlsSocket
    listener.num_tickets = 0  # The dialer would never read session tickets
    return Contexts(listener, dialer)


def _key_and_certificate(seed: bytes) -> tuple[str, str]:
    """Return a private Ed25519 key and its self-signed certificate, both in PEM.

    Nothing in the certificate is random or depends on a clock, so equal seeds give equal bytes.
    """
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a job of deepseek_zero")])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=datetime.datetime(2000, 1, 1),
        not_valid_after=datetime.datetime(9999, 12, 31, 23, 59, 59),
    )
    signs_itself = x509.BasicConstraints(ca=True, path_length=None)
    certificate = builder.add_extension(signs_itself, critical=True).sign(key, algorithm=None)
    pem = serialization.Encoding.PEM
    key_pem = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return key_pem.decode(), certificate.public_bytes(pem).decode()


@contextlib.contextmanager
def _file_of(text: str) -> Iterator[str]:
    """Yield the path of a file with this text.

    OpenSSL reads keys only from files. On Linux the file is in memory and disappears with this
    process, even if it is killed; elsewhere it has mode 0600.
    """
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("key"), "w") as file:
            file.write(text)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text)
        file.flush()
        yield file.name
