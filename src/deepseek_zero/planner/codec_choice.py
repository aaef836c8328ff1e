"""Choose codecs that save time, from the measured speed of a link and of codecs.

An element costs one rank this many seconds:

    plain   far x bytes / link
    coded   far x coded bytes / link  +  encoded / encode rate  +  decoded / decode rate

`far` is how often the rank sends it to other hosts. The times to send and to code are added,
because codecs use CPU cores that would compute the step. A codec that saves less than a tenth is
not used, because it changes the bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..base.quantities import format_bytes
from ..precision.codecs import Blocks
from .plan_settings import Compression

WORTH = 0.9  # codes are chosen if they take at most this share of the plain seconds


@dataclass(frozen=True)
class CodecRate:
    """The measured speed of a codec, in elements per second, on the slowest rank of a host.

    All ranks of the host are measured at the same time.

    Attributes:
        codec: The codec.
        encode: The number of elements that are encoded per second.
        decode: The number of elements that are decoded per second.
    """

    codec: Blocks
    encode: float
    decode: float


@dataclass(frozen=True)
class Traffic:
    """How often one rank sends, encodes and decodes each element of a collective.

    Attributes:
        far: How often this rank sends the element to other hosts.
        encoded: How often this rank would encode the element with a codec.
        decoded: How often this rank would decode the element with a codec.
        plain_bytes: The bytes of the element without a codec.
    """

    far: float
    encoded: float
    decoded: float
    plain_bytes: int

    def seconds(self, link: float, coded: CodecRate | None) -> float:
        """Return the seconds in which one rank sends, encodes and decodes an element.

        Args:
            link: The bytes per second that a rank sends to other hosts.
            coded: The speed of the codec; None for no codec.
        """
        if coded is None:
            return self.far * self.plain_bytes / link
        wire = coded.codec.nbytes(coded.codec.granule) / coded.codec.granule
        return self.far * wire / link + self.encoded / coded.encode + self.decoded / coded.decode


def gather_traffic(ranks: int, here: int, near: int, plain_bytes: int) -> Traffic:
    """Return how often a rank sends and encodes each element in an all-gather of weights.

    Args:
        ranks: The number of ranks over which states are sharded.
        here: How many of these ranks are on one host.
        near: The number of ranks per host if gradients are summed within each host first, else 1.
        plain_bytes: The bytes of an element without a codec.
    """
    far = (ranks - here) / ranks if near == 1 else (ranks / near - 1) / ranks
    return Traffic(far, 1 / ranks, 1.0, plain_bytes)


def reduce_traffic(ranks: int, here: int, near: int, plain_bytes: int) -> Traffic:
    """Return how often a rank sends and encodes each element in a reduction of gradients.

    If gradients are summed within each host first, unquantized sums are sent between hosts in fp32.

    Args:
        ranks: The number of ranks over which states are sharded.
        here: How many of these ranks are on one host.
        near: The number of ranks per host if gradients are summed within each host first, else 1.
        plain_bytes: The bytes of an element without a codec.
    """
    if near == 1:
        return Traffic((ranks - here) / ranks, 1.0, 1.0, plain_bytes)
    return Traffic((ranks / near - 1) / ranks, 1 / near, 1 / near, 4)


@dataclass(frozen=True)
class Open:
    """The candidates for the codec of weights or gradients, with their measured speeds.

    Attributes:
        traffic: How often one rank sends, encodes and decodes each element.
        among: The codecs to choose from, with their speeds.
    """

    traffic: Traffic
    among: tuple[CodecRate, ...]

    def choose(self, link: float) -> Blocks | None:
        """Return the codec that saves most time, or None if none saves at least a tenth.

        Args:
            link: The bytes per second that a rank sends to other hosts.
        """
        best = min(self.among, key=lambda each: self.traffic.seconds(link, each))
        is_worth_it = self.traffic.seconds(link, best) <= WORTH * self.traffic.seconds(link, None)
        return best.codec if is_worth_it else None

    def describe(self, link: float) -> str:
        """Return the chosen codec and the measured times as text.

        Args:
            link: The bytes per second that a rank sends to other hosts.
        """
        times = []
        for rate in (None, *self.among):
            codec = "unquantized" if rate is None else rate.codec
            times.append(f"{codec} {self.traffic.seconds(link, rate) * 1e9:.2f}")
        return f"{self.choose(link) or 'unquantized'} (ns per element: {', '.join(times)})"


def choose_codes(
    asked: Compression, link: float, weights: Open | None = None, gradients: Open | None = None
) -> Compression:
    """Choose the codecs of weights and gradients that the configuration leaves open.

    Args:
        asked: The configured compression, whose fixed choices are kept.
        link: The bytes per second that the slowest rank sends to other hosts while all ranks send.
        weights: The candidates for weights; None if their codec is configured.
        gradients: The candidates for gradients; None if their codec is configured.

    Returns:
        The compression with all choices made; its `why` contains the measurements.
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
