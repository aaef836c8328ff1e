"""The hostfile and the --include / --exclude grammar."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.cli.hostfile import (
    filter_slots,
    parse_filter,
    parse_hostfile,
    read_hostfile,
)

HOSTS = {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}


def test_a_hostfile_lists_hosts_in_order_with_their_slots() -> None:
    lines = ["# the rack", "", "worker-1 slots=2", "  worker-0   slots=4  # the first"]
    assert list(parse_hostfile(lines).items()) == [("worker-1", (0, 1)), ("worker-0", (0, 1, 2, 3))]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a slots=2", "a slots=4"], "Hostfile contains multiple entries for a"),
        (["a slots=two"], "Hostfile contains a bad entry: a slots=two"),
        (["a"], "Hostfile contains a bad entry: a"),
        (["a slots=2 b slots=2"], "Hostfile contains a bad entry"),
        ([], "Hostfile is empty or not formatted correctly"),
        (["# nothing", ""], "Hostfile is empty or not formatted correctly"),
        (["a slots=1025"], "Hostfile gives a 1025 slots, more than the 1024 processes"),
        ([f"a slots={10**11}"], "Hostfile contains a bad entry"),
    ],
)
def test_an_invalid_hostfile_raises_deepspeeds_error(lines: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_hostfile(lines)


def test_a_hostfile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent"):
        read_hostfile(tmp_path / "absent")


def test_a_file_that_is_no_text_is_no_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="Hostfile contains a bad entry"):
        read_hostfile(path)


def test_a_filter_names_hosts_and_slots() -> None:
    assert parse_filter("worker-0@worker-1:0,2") == {"worker-0": None, "worker-1": (0, 2)}


@pytest.mark.parametrize(
    "text", ["worker-0:", ":1", "worker-0:a", "worker-0@", "worker-0:1,,2", "h:99999999999"]
)
def test_a_filter_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parse_filter(text)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS),
        ("worker-1", "", {"worker-1": (0, 1, 2, 3)}),
        ("worker-1:0,2@worker-0", "", {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)}),
        ("worker-0:3,1", "", {"worker-0": (1, 3)}),
        ("", "worker-1", {"worker-0": (0, 1, 2, 3)}),
        ("", "worker-1:0", {"worker-0": (0, 1, 2, 3), "worker-1": (1, 2, 3)}),
        ("", "worker-1:0,1,2,3", {"worker-0": (0, 1, 2, 3)}),
    ],
)
def test_a_filter_keeps_the_slots_that_it_names(
    include: str, exclude: str, left: dict[str, tuple[int, ...]]
) -> None:
    assert list(filter_slots(HOSTS, include, exclude).items()) == list(left.items())


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("worker-0", "worker-1", "mutually exclusive"),
        ("worker-9", "", "Hostname 'worker-9' not found in hostfile"),
        ("", "worker-0:7", "No slot '7' specified on host 'worker-0'"),
        ("", "worker-0@worker-1", "leaves no slot"),
    ],
)
def test_a_filter_that_does_not_fit_the_hosts_is_refused(
    include: str, exclude: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        filter_slots(HOSTS, include, exclude)
