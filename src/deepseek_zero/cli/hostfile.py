"""Parse the hostfile and the filters --include and --exclude.

A slot is the number of a GPU, or of a process on a machine without GPUs. Error messages begin like
DeepSpeed's, because scripts may depend on them.

    hostfile   one `hostname slots=N` per line; blank lines and everything after # are ignored
    filter     NAME[:SLOT[,SLOT]...][@NAME...]; a name without slots means all of its slots
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from deepseek_zero.base.errors import UsageError

Slots = dict[str, tuple[int, ...]]
"""Maps a host name to its slots in the order of the hostfile; the first host is node 0."""

MOST_PROCESSES = 1024  # on one machine
_HOST_LINE = re.compile(r"^(\S+)\s+slots=(\d{1,9})$")
_SLOT = re.compile(r"\s*[0-9]{1,4}\s*")


def read_hostfile(path: Path) -> Slots:
    """Return the hosts and slots in a hostfile.

    Raises:
        UsageError: The file cannot be read or parsed.
    """
    try:
        return parse_hostfile(path.read_text(errors="replace").splitlines())
    except OSError as error:
        raise UsageError(
            f"The hostfile {path} cannot be read: {error.strerror}.",
            fix="Correct --hostfile, or leave it out.",
        ) from error


def parse_hostfile(lines: Iterable[str]) -> Slots:
    """Return the hosts in file order, each with its slots 0..N-1.

    Raises:
        UsageError: A line is invalid, a host occurs twice or has too many slots, or there is no
            host.
    """
    hosts: Slots = {}
    for line in lines:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.match(text)
        if match is None:
            raise UsageError(
                f"Hostfile contains a bad entry: {line.strip()}, unable to proceed with launching.",
                fix="Write each line as `hostname slots=N`.",
            )
        host = match.group(1)
        slots = int(match.group(2))
        if host in hosts:
            raise UsageError(
                f"Hostfile contains multiple entries for {host}, unable to proceed with launching.",
                fix="Write one line per host, with all of its slots.",
            )
        if slots > MOST_PROCESSES:
            raise UsageError(
                f"Hostfile gives {host} {slots} slots, more than the {MOST_PROCESSES} processes "
                "that are started on one machine.",
                fix="Write the number of GPUs of the host.",
            )
        hosts[host] = tuple(range(slots))
    if not hosts:
        raise UsageError(
            "Hostfile is empty or not formatted correctly, unable to proceed with launching.",
            fix="Write each line as `hostname slots=N`.",
        )
    return hosts


def parse_filter(text: str) -> dict[str, tuple[int, ...] | None]:
    """Return the hosts and slots in a filter; None for a host without slots.

    Raises:
        UsageError: The filter is invalid.
    """
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        host, colon, slots = part.strip().partition(":")
        numbers = slots.split(",") if colon else []
        if not host or not all(_SLOT.fullmatch(number) for number in numbers):
            raise UsageError(
                f"The filter {text!r} has a part that cannot be read: {part!r}.",
                why="The grammar is NAME[:SLOT[,SLOT]...], parts joined by @; a slot is a number "
                "below 10,000.",
                fix="For example: worker-0@worker-1:0,2",
            )
        earlier = named.get(host) or ()
        named[host] = earlier + tuple(int(number) for number in numbers) if colon else None
    return named


def selected_slots(hosts: Slots, include: str = "", exclude: str = "") -> Slots:
    """Apply --include or --exclude to hosts, and remove hosts without slots.

    Args:
        hosts: Slots by host.
        include: Hosts and slots to keep.
        exclude: Hosts and slots to remove.

    Returns:
        The remaining slots, in the order of the hostfile.

    Raises:
        UsageError: Both filters are given, or a host or slot is unknown.
    """
    if include and exclude:
        raise UsageError("--include and --exclude are mutually exclusive.", fix="Give one of them.")
    if not include and not exclude:
        return {host: slots for host, slots in hosts.items() if slots}
    named: Slots = {}
    for host, stated in parse_filter(include or exclude).items():
        if host not in hosts:
            raise UsageError(
                f"Hostname '{host}' not found in hostfile.", fix=f"Known hosts: {', '.join(hosts)}."
            )
        named[host] = hosts[host] if stated is None else stated
        for slot in named[host]:
            if slot not in hosts[host]:
                known = ", ".join(map(str, hosts[host])) or "none"
                raise UsageError(
                    f"No slot '{slot}' specified on host '{host}'.", fix=f"Its slots: {known}."
                )
    found = {
        host: tuple(slot for slot in slots if (slot in named.get(host, ())) != bool(exclude))
        for host, slots in hosts.items()
    }
    return {host: slots for host, slots in found.items() if slots}


def filter_slots(hosts: Slots, include: str = "", exclude: str = "") -> Slots:
    """Return the slots of `selected_slots`.

    Raises:
        UsageError: The filter is invalid, or no slot is left.
    """
    left = selected_slots(hosts, include, exclude)
    if not left:
        raise UsageError(
            "--include or --exclude leaves no slot to run on.",
            fix="Name at least one slot to keep.",
        )
    return left
