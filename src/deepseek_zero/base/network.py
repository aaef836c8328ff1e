"""The addresses of this host: which interface has one, by which other hosts reach it, and where it
listens.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

from .errors import UsageError
from .launch import GLOO_INTERFACE, INTERFACE

LOOPBACK = "127.0.0.1"
_FAR = "192.0.2.1"  # nobody's (RFC 5737): the way to it is the way to other networks
_SIOCGIFADDR = 0x8915


def is_loopback(address: str) -> bool:
    """Return whether an address is one at which a host reaches nobody but itself; False for a
    name.
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def listening_address(is_one: bool, met_at: str | None) -> str:
    """Return the one address at which this process listens: of the interface that was named, else
    loopback where all of a job is on one host, else the one by which other hosts reach this one.

    met_at: where the job meets, a name or an address; None: nobody says.  Raises `UsageError` where
    this host has no such interface, or nothing says which of its addresses others reach, OSError
    where it has no loopback as written.
    """
    if said := os.environ.get(INTERFACE):
        return address_of(said)
    return LOOPBACK if is_one else reached_at(met_at)


def reached_at(met_at: str | None) -> str:
    """Return the address by which other hosts reach this one: met_at, where that is its own, else
    of a way out of it.

    A loopback address counts only where it was written as one: a name may mean 127.0.1.1 on its own
    host.  Argument
    and errors: as `listening_address`.
    """
    if met_at == "localhost" or is_loopback(met_at or ""):
        return _address_towards(str(met_at))
    for target in filter(None, (met_at, socket.gethostname(), _FAR)):
        with contextlib.suppress(OSError):
            found = _address_towards(target)
            if not is_loopback(found):
                return found
    addresses = (_own_address(name) for _, name in socket.if_nameindex())
    own = {each for each in addresses if each is not None and not is_loopback(each)}
    if len(own) < 2:
        return own.pop() if own else LOOPBACK
    raise UsageError(
        f"nothing says which address of this host others reach: it has {', '.join(sorted(own))}.",
        f"Its own name, {socket.gethostname()}, is no help here, and it has no way to other "
        "networks.",
        f"name an interface ({INTERFACE}; the launcher's --interface).",
    )


def _address_towards(target: str) -> str:
    """Return the own address that a target means, or by which this host reaches it; OSError if
    there is none.
    """
    family, _, _, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((place[0], 0, *place[2:]))
        except OSError:  # another host's
            probe.connect(place)  # asks the routing table; nothing is sent
        return str(probe.getsockname()[0])


def lead_gloo(is_one: bool, met_at: str | None) -> None:
    """Have gloo listen where this process does, where it would not by itself, by the variable that
    it reads.

    By itself it takes what the host's own name means, and that is 127.0.1.1 on many.  What somebody
    has set stays, and what cannot be found out here is told where ranks listen themselves.
    Arguments: as `listening_address`.
    """
    if os.environ.get(GLOO_INTERFACE):
        return
    if os.environ.get(INTERFACE) or not (is_one or _has_far_name()):
        with contextlib.suppress(UsageError, OSError):
            os.environ[GLOO_INTERFACE] = interface_of(listening_address(is_one, met_at))


def _has_far_name() -> bool:
    """Return whether this host's name means an address by which others may reach it."""
    try:
        return not is_loopback(str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0]))
    except OSError:
        return False


def _own_address(name: str) -> str | None:
    """Return the IPv4 address of a network interface, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address. Raises `UsageError` if none
    has.
    """
    for _, name in socket.if_nameindex():
        if _own_address(name) == address:
            return name
    reason = "gloo, which carries the start of a run, wants the name of an interface"
    raise UsageError(
        f"no network interface of this host has the IPv4 address {address}.",
        reason + (", and what is looked for here are IPv4 addresses." if ":" in address else "."),
        "name the interface instead.",
    )


def address_of(interface: str) -> str:
    """Return the address to listen at. interface: the name of a network interface (eth0), or an
    address of this host.

    Raises `UsageError` if this host has no such interface.
    """
    if interface in (name for _, name in socket.if_nameindex()):
        if found := _own_address(interface):
            return found
        reason = "It has no IPv4 address."
    else:
        try:
            family = socket.AF_INET6 if ":" in interface else socket.AF_INET
            with socket.socket(family) as probe:
                probe.bind((interface, 0))
                return interface
        except OSError as error:
            reason = f"{error.strerror or error}."
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise UsageError(
        f"this host cannot listen at the interface {interface!r}.",
        reason,
        f"name an interface ({names}) or an address of this host.",
    )
