"""Network addresses of this host: its interfaces, and the address at which it listens."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

import psutil

from .errors import UsageError
from .launch import GLOO_INTERFACE, INTERFACE

LOOPBACK = "127.0.0.1"
_FAR = "192.0.2.1"  # reserved for documentation (RFC 5737): its route is the default route


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address; False for a host name."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def listening_address(is_one: bool, met_at: str | None) -> str:
    """Return the one address at which this process listens.

    It is the address of the configured interface, else loopback if all ranks are on one host, else
    the address by which other hosts reach this one.

    Args:
        is_one: Whether all ranks are on this host.
        met_at: Name or address of the rendezvous, or None if unknown.

    Returns:
        An IP address as text.

    Raises:
        UsageError: This host has no such interface, or it is ambiguous which of its addresses
            others reach.
        OSError: This host has no loopback address.
    """
    if said := os.environ.get(INTERFACE):
        return address_of(said)
    return LOOPBACK if is_one else reached_at(met_at)


def reached_at(met_at: str | None) -> str:
    """Return the address by which other hosts reach this one.

    It is `met_at` if that is this host's own address, else the source address of a route to it. A
    loopback address counts only if it was given literally, because a host's own name may resolve to
    127.0.1.1.

    Args:
        met_at: Name or address of the rendezvous, or None if unknown.

    Returns:
        An IP address as text.

    Raises:
        UsageError: It is ambiguous which of this host's addresses others reach.
        OSError: This host has no loopback address.
    """
    if met_at == "localhost" or is_loopback(met_at or ""):
        return _address_towards(str(met_at))
    for target in filter(None, (met_at, socket.gethostname(), _FAR)):
        with contextlib.suppress(OSError, UnicodeError):  # the second one: an invalid name
            found = _address_towards(target)
            if not is_loopback(found):
                return found
    addresses = _own_addresses().values()
    own = {each for each in addresses if each is not None and not is_loopback(each)}
    if len(own) < 2:
        return own.pop() if own else LOOPBACK
    raise UsageError(
        f"it is unknown which address other hosts can reach: {', '.join(sorted(own))}.",
        f"Its name, {socket.gethostname()}, resolves to none of them, and it has no route to other "
        "networks.",
        f"name an interface ({INTERFACE}; the launcher's --interface).",
    )


def _address_towards(target: str) -> str:
    """Return this host's own address `target`, or its source address towards it.

    Raises OSError if there is none.
    """
    family, _, _, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((place[0], 0, *place[2:]))
        except OSError:  # another host's
            probe.connect(place)  # queries the routing table; nothing is sent
        return str(probe.getsockname()[0])


def lead_gloo(is_one: bool, met_at: str | None) -> None:
    """Set GLOO_SOCKET_IFNAME so that gloo listens at the same address as this process.

    By default gloo uses the address of the host's own name, which is 127.0.1.1 on many hosts. A
    variable that is already set is kept. Errors are ignored here, because they are reported when
    ranks start to listen.

    Args:
        is_one: Whether all ranks are on this host.
        met_at: Name or address of the rendezvous, or None if unknown.
    """
    if os.environ.get(GLOO_INTERFACE):
        return
    if os.environ.get(INTERFACE) or not (is_one or _has_far_name()):
        with contextlib.suppress(UsageError, OSError):
            os.environ[GLOO_INTERFACE] = interface_of(listening_address(is_one, met_at))


def _has_far_name() -> bool:
    """Return whether this host's name resolves to an address other hosts may reach."""
    try:
        return not is_loopback(str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0]))
    except OSError:
        return False


def _own_addresses() -> dict[str, str | None]:
    """Return the IPv4 address of each network interface, or None, by the interface's name."""
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        of_ipv4 = (each.address for each in addresses if each.family == socket.AF_INET)
        found[name] = next(of_ipv4, None)
    return found


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address.

    Raises:
        UsageError: No interface has it.
    """
    for name, own in _own_addresses().items():
        if own == address:
            return name
    reason = "gloo, which connects the ranks at the start, needs the name of an interface"
    if ":" in address:
        reason += ", and only IPv4 addresses can be found"
    raise UsageError(
        f"no network interface of this host has the IPv4 address {address}.",
        f"{reason}.",
        "name the interface instead.",
    )


def address_of(interface: str) -> str:
    """Return the address to listen at.

    Args:
        interface: The name of a network interface (eth0), or an address of this host.

    Raises:
        UsageError: This host has no such interface or address.
    """
    addresses = _own_addresses()
    if interface in addresses:
        if found := addresses[interface]:
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
    raise UsageError(
        f"this host cannot listen at the interface {interface!r}.",
        reason,
        f"name an interface ({', '.join(addresses)}) or an address of this host.",
    )
