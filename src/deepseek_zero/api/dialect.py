"""What depends on the name under which a program has imported the library.

`initialize` and `zero.Init` ask the dialect, which is chosen once for each call.  `Plain` is this
library's own; a package above contributes another one (base/plugins.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ..base.mesh import Mesh
from ..base.plugins import DIALECT, contributions
from ..config.load import load
from ..config.raw_config import RawConfig
from ..engine.data import ShardedLoader
from ..engine.dialect import BuildRules, EngineDialect
from ..engine.engine import Parts
from ..engine.request import Request
from ..sharding import access, init
from .distributed import join
from .engine import ZeroEngine

if TYPE_CHECKING:  # as in engine/engine.py
    from ..config import Config


class Dialect(Protocol):
    """The decisions of an API that differ between the names of the library."""

    # Subclasses of api/zero.py's; None: these classes themselves
    init_class: type[init.Init] | None
    gathered_class: type[access.GatheredParameters] | None

    def load(self, source: Any, origin: str | None) -> RawConfig:
        """Read a configuration, with the dialect's defaults for keys that are not stated."""
        ...

    def join(self, port: int, required: bool | None) -> None:
        """Join the ranks of the job.  Collective under a launcher."""
        ...

    def complete(self, raw: RawConfig, request: Request) -> Request:
        """Return what else is known about the call; raise for what the dialect does not allow."""
        ...

    def rules(self, config: Config, mesh: Mesh, request: Request) -> BuildRules:
        """Return what is said about the parts of an engine before they are built."""
        ...

    def make_loader(
        self, config: Config, mesh: Mesh, parts: Parts, request: Request
    ) -> ShardedLoader:
        """Make the loader of this rank's share of the training data."""
        ...

    def make_engine(
        self,
        config: Config,
        mesh: Mesh,
        parts: Parts,
        request: Request,
        lr_scheduler: Any,
        loader: Any,
    ) -> ZeroEngine:
        """Make the engine of finished parts."""
        ...

    def show_names(self, session: init.Init) -> None:
        """Let parameters that are built sharded answer to the dialect's attributes."""
        ...


class Plain(EngineDialect[ZeroEngine]):
    """The library under its own name: its own defaults, and nothing else is shown or refused."""

    init_class: type[init.Init] | None = None
    gathered_class: type[access.GatheredParameters] | None = None

    def __init__(self) -> None:
        super().__init__(ZeroEngine)

    def load(self, source: Any, origin: str | None) -> RawConfig:
        return load(source, origin=origin)

    def join(self, port: int, required: bool | None) -> None:
        if required is not False:
            join(distributed_port=port)

    def complete(self, raw: RawConfig, request: Request) -> Request:
        return request

    def show_names(self, session: init.Init) -> None:
        return None


def current_dialect() -> Dialect:
    """Return the dialect of a call that begins now."""
    for module in contributions(DIALECT):
        chosen: Dialect = module.choose()
        return chosen
    return Plain()
