"""Behavior that depends on the package name that a program imports.

`initialize` and `zero.Init` select the dialect once per call. The package `compat` registers the
dialect for the name `deepspeed` (base/plugins.py).
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
    """Behavior that depends on the package name that a program imports.

    This class is the dialect of programs that import `deepseek_zero`. A subclass overrides the
    methods whose result differs for programs that import `deepspeed`.

    Attributes:
        init_class: The subclass of `api.zero.Init` that `zero.Init` constructs; None for
            `api.zero.Init` itself.
        gathered_class: The subclass of `api.zero.GatheredParameters` that
            `zero.GatheredParameters` constructs; None for the class itself.
    """

    init_class: type[zero_init.Init] | None = None
    gathered_class: type[gathered_parameters.GatheredParameters] | None = None

    def __init__(self) -> None:
        super().__init__(ZeroEngine)

    def load(self, source: Any, origin: str | None) -> RawConfig:
        """Read a configuration with the library's own defaults.

        Args:
            source: A dict, a path, JSON text or base64.
            origin: The name of the argument that contained `source`, for error messages; None
                if there is none.

        Returns:
            The checked configuration, in which "auto" values are not yet resolved.
        """
        return load(source, origin=origin)

    def join(self, port: int, required: bool | None) -> None:
        """Join the process group of the job, unless the process has joined already.

        Args:
            port: The port of the rendezvous, used only if the launcher sets none.
            required: If False, the program has created the process group.

        Raises:
            UsageError: `required` is False, and there is no process group.

        Note:
            Collective under a launcher: every rank must call it.
        """
        join(distributed_port=port, dist_init_required=required)

    def complete(self, raw: RawConfig, request: Request) -> Request:
        """Add the arguments that this dialect implies to a call of `initialize`.

        Args:
            raw: The checked configuration, in which "auto" values are not yet resolved.
            request: The arguments that the program passed to `initialize`.

        Returns:
            The arguments with which the engine is built. The base class returns `request`
            unchanged.

        Raises:
            UsageError: The dialect does not allow the call.
        """
        return request

    def show_names(self, session: zero_init.Init) -> None:
        """Add attributes such as `ds_shape` to the parameters that `zero.Init` sharded.

        The base class adds none.
        """


def current_dialect() -> Dialect:
    """Return the dialect of the package name that the program has imported.

    `initialize` and `zero.Init` call it once at their start.
    """
    for module in contributions(DIALECT):
        chosen: Dialect = module.choose()
        return chosen
    return Dialect()
