"""The address at which other hosts reach this host, and the listening interface."""

from __future__ import annotations

import os
import socket

import pytest

from deepseek_zero.base import network
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.launch import GLOO_INTERFACE, INTERFACE

MEANT = {"h0": "127.0.1.1", "h1": "10.77.0.2", network._FAR: "10.77.0.1"}


@pytest.fixture
def on_h0(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Imitate a Debian host whose own name resolves to loopback, and return its interfaces."""
    interfaces = {"lo": "127.0.0.1", "v0": "10.77.0.1"}
    for name in (INTERFACE, GLOO_INTERFACE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "h0")
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *_, **__: [(0, 0, 0, "", (MEANT.get(name, name), 0))]
    )
    monkeypatch.setattr(network, "_own_addresses", lambda: interfaces)
    monkeypatch.setattr(network, "_address_towards", lambda target: MEANT.get(target, target))
    return interfaces


def test_loopback_is_used_only_if_given_explicitly(on_h0: dict[str, str]) -> None:
    assert network.reached_at("127.0.0.1") == "127.0.0.1"
    assert network.reached_at("localhost") == "localhost", "whatever address that is"
    assert network.reached_at("h0") == network.reached_at(None) == "10.77.0.1"
    assert network.reached_at("10.77.0.9") == "10.77.0.9", (
        "its own, or by which it reaches that one"
    )


def test_without_a_default_route_the_only_address_is_used_and_several_are_refused(
    on_h0: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEANT, network._FAR, "127.0.0.1")
    assert network.reached_at("h0") == "10.77.0.1"
    on_h0["v1"] = "10.88.0.1"
    with pytest.raises(UsageError, match=r"(?s)can reach: 10\.77\.0\.1, 10\.88\.0\.1.*--interface"):
        network.reached_at("h0")
    on_h0.clear()
    assert network.reached_at("h0") == network.LOOPBACK


def test_gloo_gets_an_address_if_the_host_name_is_not_reachable_or_an_interface_is_set(
    on_h0: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def led(is_one: bool, met_at: str) -> str | None:
        network.lead_gloo(is_one, met_at)
        return os.environ.pop(GLOO_INTERFACE, None)

    assert (led(False, "h0"), led(True, "h0"), led(False, "127.0.0.1")) == ("v0", None, "lo")
    monkeypatch.setitem(MEANT, "h0", "10.77.0.1")
    assert led(False, "h1") is None, "gloo finds that by itself"
    monkeypatch.setenv(INTERFACE, "lo")
    assert led(False, "h1") == led(True, "h1") == "lo"
    monkeypatch.setenv(INTERFACE, "nosuch0")
    assert led(False, "h1") is None, "an error that all ranks hear of comes later"
    monkeypatch.setenv(INTERFACE, "v0")
    monkeypatch.setenv(GLOO_INTERFACE, "eth9")
    assert led(False, "h1") == "eth9"


def test_an_interface_is_a_name_or_an_address_or_refused() -> None:
    assert network.address_of("lo") == network.address_of("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"(?s)nosuch0.*lo"):
        network.address_of("nosuch0")
