"""What depends on the name under which a program has imported the library.

`initialize` and `zero.Init` ask the dialect, which is chosen once for each call.  `Plain` is this
library's own; a package above contributes another one (base/plugins.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ..base.plugins import DIALECT, contributions
from ..config.load import load
from ..config.raw_config import RawConfig
from ..engine.dialect import EngineBuilder, EngineDialect
from ..engine.request import Request
from ..extensions import gathered_parameters, zero_init
from .distributed import join
from .engine import ZeroEngine

if TYPE_CHECKING:  # as in engine/engine.py
    pass


class Dialect(EngineBuilder[ZeroEngine], Protocol):
    """The decisions of an API that differ between the names of the library."""

    # Subclasses of api/zero.py's; None: these classes themselves
    init_class: type[zero_init.Init] | None
    gathered_class: type[gathered_parameters.GatheredParameters] | None

    def load(self, source: Any, origin: str | None) -> RawConfig:
        """Read a configuration, with the dialect's defaults for keys that are not stated."""
        ...

    def join(self, port: int, required: bool | None) -> None:
        """Join the ranks of the job.  Collective under a launcher."""
        ...

    def complete(self, raw: RawConfig, request: Request) -> Request:
        """Return what else is known about the call; raise for what the dialect does not allow."""
        ...

    def show_names(self, session: zero_init.Init) -> None:
        """Let parameters that are built sharded answer to the dialect's attributes."""
        ...


class Plain(EngineDialect[ZeroEngine]):
    """The library under its own name: its own defaults, and nothing else is shown or refused."""

    init_class: type[zero_init.Init] | None = None
    gathered_class: type[gathered_parameters.GatheredParameters] | None = None

    def __init__(self) -> None:
        super().__init__(ZeroEngine)

    def load(self, source: Any, origin: str | None) -> RawConfig:
        return load(source, origin=origin)

    def join(self, port: int, required: bool | None) -> None:
        if required is not False:
            join(distributed_port=port)

    def complete(self, raw: RawConfig, request: Request) -> Request:
        return request

    def show_names(self, session: zero_init.Init) -> None:
        return None


def current_dialect() -> Dialect:
    """Return the dialect of a call that begins now."""
    for module in contributions(DIALECT):
        chosen: Dialect = module.choose()
        return chosen
    return Plain()
