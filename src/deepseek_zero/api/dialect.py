"""Behavior that depends on the name under which a program imported the library.

`initialize` and `zero.Init` select the dialect once per call. A package above can register another
one (base/plugins.py).
"""

from __future__ import annotations

from typing import Any

from ..base.plugins import DIALECT, contributions
from ..config.load import load
from ..config.raw_config import RawConfig
from ..engine.dialect import EngineDialect
from ..engine.request import Request
from ..extensions import gathered_parameters, zero_init
from .distributed import join
from .engine import ZeroEngine


class Dialect(EngineDialect[ZeroEngine]):
    """The behavior of the library under its own name.

    A subclass overrides the decisions that differ under another name.

    Attributes:
        init_class: A subclass of `api.zero.Init` to use in its place, or None.
        gathered_class: A subclass of `api.zero.GatheredParameters` to use in its place, or None.
    """

    init_class: type[zero_init.Init] | None = None
    gathered_class: type[gathered_parameters.GatheredParameters] | None = None

    def __init__(self) -> None:
        super().__init__(ZeroEngine)

    def load(self, source: Any, origin: str | None) -> RawConfig:
        """Read a configuration with the library's own defaults.

        Args:
            source: A dict, a path, JSON text or base64.
            origin: The argument that contained it, for error messages.

        Returns:
            The values of the source, not yet checked.
        """
        return load(source, origin=origin)

    def join(self, port: int, required: bool | None) -> None:
        """Join the process group of the job, unless the process has joined already.

        Args:
            port: The port of the rendezvous, if the launcher sets none.
            required: False if the process has joined already.

        Note:
            Collective under a launcher: every rank must call it.
        """
        if required is not False:
            join(distributed_port=port)

    def complete(self, raw: RawConfig, request: Request) -> Request:
        """Return the arguments of `initialize` with those that the dialect adds.

        Args:
            raw: Configuration of `initialize`, not yet checked.
            request: Arguments of `initialize`.

        Raises:
            UsageError: The dialect does not allow the call.
        """
        return request

    def show_names(self, session: zero_init.Init) -> None:
        """Add the dialect's attributes, such as `ds_shape`, to parameters of a sharded model."""


def current_dialect() -> Dialect:
    """Return the dialect for a call of `initialize` or `zero.Init` that starts now."""
    for module in contributions(DIALECT):
        chosen: Dialect = module.choose()
        return chosen
    return Dialect()
