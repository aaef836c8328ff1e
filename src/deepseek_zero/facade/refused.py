"""Names that can be imported and not used: who imports one may never use it, and who does is told why not.

In `from deepspeed.x import y` Python shows an ImportError of its own and drops ours, so for names that clients import
so the error waits for the first use.  Reached through the drop-in.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..base.errors import UnknownNameError

SEQUENCE = "Sequence parallelism comes with a later part; a long sequence is cut by checkpointing and offload today."


class Refused:
    """A class or function of DeepSpeed's that is not built."""

    def __init__(self, name: str, why: str) -> None:
        self.__name__, self._why = name, why

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error()

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error(f".{name}")

    def _error(self, attribute: str = "") -> UnknownNameError:
        return UnknownNameError(
            f"{self.__name__}{attribute} is DeepSpeed's and is not built.",
            self._why,
            "leave it out; docs/reference/deepspeed-names.md lists what there is.",
        )


REFUSED: dict[str, Refused] = {
    name: Refused(f"deepspeed.runtime.sequence_parallel.ulysses_sp.{name}", SEQUENCE)
    for name in (
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter SequenceTiledCompute sequence_tiled_compute TiledMLP "
        "TiledFusedLogitsLoss"
    ).split()
}


def __getattr__(name: str) -> Refused:
    if name in REFUSED:
        return REFUSED[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
