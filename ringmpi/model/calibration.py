"""What was measured of a machine, as the text of a machine file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringmpi.digits import whole_number
from ringmpi.errors import ConfigError
from ringmpi.model.machine import Points
from ringmpi.schedule import Pass

#: Tokens of the blocks that are measured where nobody says which, and of the longest that make sense: no rank
#: attends to more at once.
LENGTHS = (256, 1024, 4096)
LONGEST = 2**24

#: Seconds for all of the compute, where nobody says how many: with the links less than a minute.
SECONDS = 20.0

#: The first words of a file that was written here, by which it is known again.
FIRST_WORDS = "# Measured by ringmpi calibrate"

#: A size of message tells of bandwidth if it takes at least this many times the latency; below, one would
#: divide by the difference of two times that are nearly alike.
TELLING = 2.0


@dataclass(frozen=True)
class LinkRates:
    """What was measured of one kind of link.

    Attributes
    ----------
    latency : float
        Seconds.
    bandwidth : sequence of (float, float)
        Bytes of a message, and bytes a second.
    total : float or None
        Bytes a second from a rank to all others together; None where there is one other.
    eager_limit : int or None
        Bytes of the largest message that needs no help; None where it cannot be seen.
    how : str
        Between which ranks.
    """

    latency: float
    bandwidth: Points
    total: float | None
    eager_limit: int | None
    how: str


@dataclass(frozen=True)
class Noise:
    """How unequally long the same work takes.

    Attributes
    ----------
    relative : float
        Standard deviation over mean.
    worst : float
        The longest piece over the median one.
    how : str
    """

    relative: float
    worst: float
    how: str


@dataclass(frozen=True)
class Calibration:
    """Everything that was measured.

    Attributes
    ----------
    header : sequence of str
        How, when and where; the lines of a comment.
    about : str
    memory : float
        Bytes a rank.
    ranks_per_node : int
    compute : mapping
        Points of FLOP/s over the tokens of a block, by pass, by dtype.
    compute_how : str
    noise : Noise
    links : mapping of str to LinkRates
        By kind; empty with one rank.
    overlap : mapping of str to float
        Hidden part of a transfer, by progress.
    overlap_how : str
    """

    header: Sequence[str]
    about: str
    memory: float
    ranks_per_node: int
    compute: Mapping[str, Mapping[Pass, Points]]
    compute_how: str
    noise: Noise
    links: Mapping[str, LinkRates] = field(default_factory=dict)
    overlap: Mapping[str, float] = field(default_factory=dict)
    overlap_how: str = ""


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return lengths of blocks, rising. Local.

    Raises
    ------
    ConfigError
        If they are none.

    Examples
    --------
    >>> parse_lengths("1024,256")
    (256, 1024)
    """
    lengths = {whole_number(part) or 0 for part in text.split(",")}
    if not 0 < min(lengths) <= max(lengths) <= LONGEST:
        raise ConfigError(f"lengths={text!r}: use tokens from 1 to {LONGEST}, such as 256,1024,4096")
    return tuple(sorted(lengths))


def bandwidths(latency: float, times: Points) -> Points:
    """Return bytes a second by the bytes of a message, so that ``latency + nbytes / bandwidth`` is its time.

    Messages that take hardly longer than the latency are left out, unless all do. One that took longer than a
    larger one was held up by something else, and has the larger one's time. Local.

    Parameters
    ----------
    latency : float
        Seconds.
    times : sequence of (float, float)
        Bytes of messages, rising, and their seconds.

    Examples
    --------
    >>> bandwidths(1.0, [(8, 1.001), (1000, 2.0), (10000, 6.0)])
    ((1000, 1000.0), (10000, 2000.0))
    """
    least = [(nbytes, min(t for _, t in times[index:])) for index, (nbytes, _) in enumerate(times)]
    telling = [(nbytes, nbytes / (t - latency)) for nbytes, t in least if t >= TELLING * latency]
    nbytes, seconds = times[-1]
    return tuple(telling) or ((nbytes, nbytes / seconds),)


def machine_toml(found: Calibration) -> str:
    """Return the text of a machine file. Local.

    Raises
    ------
    ConfigError
        If nothing was measured of some dtype, so that there is nothing to write.
    """
    lines = [f"{FIRST_WORDS}: {found.header[0]}"]
    lines += [f"# {line}" for line in found.header[1:]]
    lines += [
        f"about = {_text(found.about)}",
        f"memory = {found.memory:.4g}  # of the node, shared by the ranks that were here; bytes a rank",
        f"ranks_per_node = {found.ranks_per_node}  # those that were here",
    ]
    for dtype, passes in found.compute.items():
        if not all(passes.values()):
            raise ConfigError(
                f"dtype={dtype}: no length was measured; give more --seconds, or shorter --lengths"
            )
        lines += ["", f"# {found.compute_how}", f"[compute.{dtype}]"]
        lines += [f"{direction.value} = {_curve(points)}" for direction, points in passes.items()]
    for kind, link in found.links.items():
        lines += ["", f"# {link.how}", f"[links.{kind}]", f"latency = {link.latency:.4g}"]
        lines.append(f"bandwidth = {_curve(link.bandwidth)}")
        if link.total is not None:
            largest = max(rate for _, rate in link.bandwidth)
            note = "" if link.total >= largest else f"  # measured {link.total:.4g}, less than to one"
            lines.append(f"total = {_number(max(link.total, largest))}{note}")
        if link.eager_limit is not None:
            lines.append(f"eager_limit = {link.eager_limit}")
    lines += [
        "",
        f"# {found.noise.how}; the worst took {found.noise.worst:.2f} times the median",
        "[noise]",
    ]
    lines.append(f"relative = {found.noise.relative:.4g}")
    if found.overlap:
        lines += ["", f"# {found.overlap_how}", "[overlap]"]
        lines += [f"{progress} = {hidden:.3f}" for progress, hidden in found.overlap.items()]
    return "\n".join(lines) + "\n"


def _curve(points: Points) -> str:
    return f"[{', '.join(f'[{size:.0f}, {_number(value)}]' for size, value in points)}]"


def _number(value: float) -> str:
    """Return a number with enough digits for what was measured, and the same ones everywhere."""
    return f"{value:.5g}"


def _text(text: str) -> str:
    """Return a TOML string; a host's name may contain anything."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
