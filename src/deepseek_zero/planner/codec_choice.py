"""Which codes pay, from what a link and the codecs were measured to take: a function of numbers
alone.

An element that travels takes, of one rank,

    plain   far x bytes / link
    coded   far x coded bytes / link  +  encoded / encode rate  +  decoded / decode rate

seconds, where `far` counts how often a rank sends it to other hosts.  The two kinds of work are
added up: where a step computes meanwhile, codecs take cores from it.  A codec that saves less than
a tenth is not worth other bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..base.quantities import format_bytes
from ..precision.codecs import Blocks
from .plan_settings import Compression

WORTH = 0.9  # of the plain seconds: what codes may take at most to be chosen


@dataclass(frozen=True)
class CodecRate:
    """Elements a second that the slowest rank encodes and decodes, while the others of its host do
    the same.
    """

    codec: Blocks
    encode: float
    decode: float


@dataclass(frozen=True)
class Traffic:
    """What one movement makes of an element, on one rank.

    far: times it is sent to other hosts.  encoded, decoded: times it would be.  plain_bytes: of it,
    uncoded.
    """

    far: float
    encoded: float
    decoded: float
    plain_bytes: int

    def seconds(self, link: float, coded: CodecRate | None) -> float:
        """Return the seconds that an element takes.  link: bytes a second.  coded: None: as it
        is.
        """
        if coded is None:
            return self.far * self.plain_bytes / link
        wire = coded.codec.nbytes(coded.codec.granule) / coded.codec.granule
        return self.far * wire / link + self.encoded / coded.encode + self.decoded / coded.decode


def gather_traffic(ranks: int, here: int, near: int, plain_bytes: int) -> Traffic:
    """Return what a gather of a weight makes of an element.

    ranks: that share slices; here: of them those of one host; near: as `GroupPlan` has it.
    """
    far = (ranks - here) / ranks if near == 1 else (ranks / near - 1) / ranks
    return Traffic(far, 1 / ranks, 1.0, plain_bytes)


def reduce_traffic(ranks: int, here: int, near: int, plain_bytes: int) -> Traffic:
    """Return what a sum of gradients makes of an element; by host, sums of fp32 travel between
    hosts as they are.
    """
    if near == 1:
        return Traffic((ranks - here) / ranks, 1.0, 1.0, plain_bytes)
    return Traffic((ranks / near - 1) / ranks, 1 / near, 1 / near, 4)


@dataclass(frozen=True)
class Open:
    """One state whose codec is to be chosen among some."""

    traffic: Traffic
    among: tuple[CodecRate, ...]

    def choose(self, link: float) -> Blocks | None:
        """Return the codec that takes least over a link of so many bytes a second, None where none
        is worth it.
        """
        best = min(self.among, key=lambda each: self.traffic.seconds(link, each))
        is_worth_it = self.traffic.seconds(link, best) <= WORTH * self.traffic.seconds(link, None)
        return best.codec if is_worth_it else None

    def describe(self, link: float) -> str:
        """Return the choice and the numbers that decided."""
        times = []
        for rate in (None, *self.among):
            codec = "as they are" if rate is None else rate.codec
            times.append(f"{codec} {self.traffic.seconds(link, rate) * 1e9:.2f}")
        return f"{self.choose(link) or 'as they are'} (ns an element: {', '.join(times)})"


def choose_codes(
    asked: Compression, link: float, weights: Open | None = None, gradients: Open | None = None
) -> Compression:
    """Return a compression with what was left open chosen, and why.

    link: bytes a second that the slowest rank sends to other hosts while all ranks do.  weights,
    gradients: None: they are stated, or not to be coded.
    """
    found = asked
    said = [f"a rank sends {format_bytes(link)}/s to other hosts"]
    if weights is not None:
        found = replace(found, weights=weights.choose(link))
        said.append(f"weights {weights.describe(link)}")
    if gradients is not None:
        found = replace(found, gradients=gradients.choose(link))
        said.append(f"gradients {gradients.describe(link)}")
    return replace(found, why="; ".join(said))
