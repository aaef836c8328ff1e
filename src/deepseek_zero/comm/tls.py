"""TLS 1.3 for a job's own connections, with one certificate that every process of the job makes from its secret.

The job's secret gives an Ed25519 key (RFC 8032), the key a certificate that it signs itself, byte for byte the same in
every process.  Each end shows it and takes no other: who can finish a handshake holds the key, and so the secret.  No
certificate is handed out, nothing has to be renewed, and what the channel proves by itself (channel.py) stays as it is.

Python's ssl cannot make certificates: the dozen lines of arithmetic and of DER below do.  They run once in a process;
the handshakes and everything that is encrypted are OpenSSL's.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import os
import ssl
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

RECORD_BYTES = 1 << 14  # of one TLS record, at most

# The curve of Ed25519, in extended coordinates (RFC 8032, 5.1).
_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_BASE_Y = 4 * pow(5, -1, _P) % _P
_BASE_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_Point = tuple[int, int, int, int]
_BASE: _Point = (_BASE_X, _BASE_Y, 1, _BASE_X * _BASE_Y % _P)

_SEQUENCE, _SET, _INTEGER, _BITS, _OCTETS, _OBJECT, _TEXT, _TIME, _TRUE = 48, 49, 2, 3, 4, 6, 12, 24, 1
_ED25519, _COMMON_NAME, _BASIC_CONSTRAINTS = bytes([43, 101, 112]), bytes([85, 4, 3]), bytes([85, 29, 19])


class Contexts(NamedTuple):
    """How the doors and the dialers of one job speak TLS."""

    door: ssl.SSLContext
    dialer: ssl.SSLContext


class TlsSocket(ssl.SSLSocket):
    """A connection by TLS that raises BlockingIOError where a plain one does, and gathers what it writes."""

    def recv(self, *args: Any) -> bytes:
        if self.version() is None:  # ssl asks so of a connection that ended before TLS began, and would leave it open
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended before TLS began")
        try:
            return super().recv(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, *args: Any) -> int:
        try:
            return super().recv_into(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, *args: Any) -> int:
        try:
            return super().send(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendmsg(self, buffers: Iterable[bytes | memoryview], *_: Any) -> int:  # type: ignore[override]
        """Send the first buffers, as many as make a record; return the bytes that were taken."""
        found: list[bytes | memoryview] = []
        size = 0
        for buffer in buffers:
            if found and size + len(buffer) > RECORD_BYTES:
                break
            found.append(buffer)
            size += len(buffer)
        return self.send(found[0] if len(found) == 1 else b"".join(found))

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


@functools.cache
def contexts(secret: bytes) -> Contexts:
    """Return the job's contexts. secret: of 32 bytes, which all its processes hold."""
    seed = hmac.new(secret, b"tls key", hashlib.sha256).digest()
    certificate = ssl.DER_cert_to_PEM_cert(_certificate(seed))
    key = _der(_SEQUENCE, _der(_INTEGER, b"\0"), _ALGORITHM, _der(_OCTETS, _der(_OCTETS, seed)))
    both = Contexts(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    with _file_of(_pem("PRIVATE KEY", key) + certificate) as path:
        for context in both:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the key is the identity, wherever its holder is
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(path)
            context.load_verify_locations(cadata=certificate)
            context.sslsocket_class = TlsSocket
    both.door.num_tickets = 0  # or a door would write what nobody reads
    return both


@contextlib.contextmanager
def _file_of(text: str) -> Iterator[str]:
    """Yield the path of a file with this text, for OpenSSL, which reads keys from files alone.

    On Linux it is memory that ends with this process, also where that is killed; elsewhere a file of mode 0600.
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


def _certificate(seed: bytes) -> bytes:
    """Return the certificate of a key, signed by itself, in DER. seed: of the key, 32 bytes."""
    public = _public_key(seed)
    part = _der(_SEQUENCE, _der(_OBJECT, _COMMON_NAME), _der(_TEXT, b"a job of deepseek_zero"))
    name = _der(_SEQUENCE, _der(_SET, part))
    dates = _der(_SEQUENCE, _der(_TIME, b"20000101000000Z"), _der(_TIME, b"99991231235959Z"))  # no clock is asked
    constraints = _der(_SEQUENCE, _der(_TRUE, b"\xff"))  # it signs a certificate: its own
    extension = _der(_SEQUENCE, _der(_OBJECT, _BASIC_CONSTRAINTS), _der(_TRUE, b"\xff"), _der(_OCTETS, constraints))
    said = _der(
        _SEQUENCE,
        _der(0xA0, _der(_INTEGER, b"\2")),  # version 3
        _der(_INTEGER, b"\1"),
        _ALGORITHM,
        name,
        dates,
        name,
        _der(_SEQUENCE, _ALGORITHM, _der(_BITS, b"\0", public)),
        _der(0xA3, _der(_SEQUENCE, extension)),
    )
    return _der(_SEQUENCE, said, _ALGORITHM, _der(_BITS, b"\0", _sign(seed, said)))


def _der(tag: int, *parts: bytes) -> bytes:
    """Return one value in DER: its tag, its length, its content."""
    content = b"".join(parts)
    size = len(content)
    if size < 128:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 128 + len(length)]) + length + content


_ALGORITHM = _der(_SEQUENCE, _der(_OBJECT, _ED25519))


def _pem(what: str, der: bytes) -> str:
    return ssl.DER_cert_to_PEM_cert(der).replace("CERTIFICATE", what)


def _public_key(seed: bytes) -> bytes:
    return _encoded(_times(_scalar(seed), _BASE))


def _sign(seed: bytes, message: bytes) -> bytes:
    """Return the Ed25519 signature of a message."""
    scalar, prefix = _scalar(seed), hashlib.sha512(seed).digest()[32:]
    nonce = int.from_bytes(hashlib.sha512(prefix + message).digest(), "little") % _ORDER
    commitment = _encoded(_times(nonce, _BASE))
    challenge = hashlib.sha512(commitment + _public_key(seed) + message).digest()
    answer = (nonce + int.from_bytes(challenge, "little") * scalar) % _ORDER
    return commitment + answer.to_bytes(32, "little")


def _scalar(seed: bytes) -> int:
    number = int.from_bytes(hashlib.sha512(seed).digest()[:32], "little")
    return number & ((1 << 254) - 8) | 1 << 254


def _times(number: int, point: _Point) -> _Point:
    total: _Point = (0, 1, 1, 0)
    while number:
        if number & 1:
            total = _plus(total, point)
        point, number = _plus(point, point), number >> 1
    return total


def _plus(one: _Point, other: _Point) -> _Point:
    a = (one[1] - one[0]) * (other[1] - other[0]) % _P
    b = (one[1] + one[0]) * (other[1] + other[0]) % _P
    c, d = 2 * one[3] * other[3] * _D % _P, 2 * one[2] * other[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _encoded(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")
