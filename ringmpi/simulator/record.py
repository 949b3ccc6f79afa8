"""What is kept of a simulated pass: everything, or some ranks in full and sums of all.

A trace of 16384 ranks has 16384 steps each and does not fit into memory. Beyond `MOST_ENTRIES` the steps of a
rank are laid end to end as one record, *condensed*: it starts with the first step and ends with the last, and
its compute, stall, overhead and counts are those of all steps together. All metrics that are sums over steps
read it like any other trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.simulator.flows import Load
from ringmpi.trace import QUANTITIES, RECORD

Array = NDArray[Any]
Ranks = NDArray[np.intp]

#: Records of a pass, over ranks and steps, that are kept in full: those of 512 ranks of a ring.
MOST_ENTRIES = 2**18

#: Ranks that are kept in full beyond that, beside those that are slowed down.
WATCHED = 8


def watched_ranks(size: int, steps: int, slow: Mapping[int, float]) -> Ranks:
    """Return whose steps are kept in full: all ranks, or the first, the last, some between, the slow. Local.

    Parameters
    ----------
    size, steps : int
        Numbers of ranks, and of steps of each.
    slow : mapping of int to float
        Ranks that compute slower than the others, and how much.
    """
    if size * steps <= MOST_ENTRIES:
        return np.arange(size)
    spread = np.linspace(0, size - 1, WATCHED).round().astype(np.intp)
    slowest = sorted(slow, key=lambda rank: (-slow[rank], rank))[:WATCHED]
    return np.unique(np.concatenate([spread, np.array(slowest, np.intp)]))


#: Columns that say what was waited for; there are files without.
AWAITED = ("waited_for", "peer_posted")

#: Moments are sums, right to this part of themselves: of thousands of terms, each rounded by 1.1e-16 at most.
#: What is later by less ends at once, or the order of additions would tell what was waited for.
ROUNDING = 1e-12

#: Tiles are not known: a machine that is not here has cut none.
TILES = ("tiles", "tiles_unmasked", "tiles_skipped")

#: What is summed over steps: seconds, and counts.
SUMMED = ("compute", *Load.SENT, "pairs")


def later(moments: Array, others: Array) -> Array:
    """Return which moments are later than others, by more than the rounding of either. Local.

    >>> later(np.array([1.0, 1.0 + 1e-15, 1.1, 1.0]), np.array([1.0, 1.0, 1.0, -np.inf]))
    array([False, False,  True,  True])
    """
    return np.asarray(moments > others * (1 + ROUNDING))


class Recorder:
    """Takes the steps of a pass as they end, and keeps them as a trace. Local.

    Parameters
    ----------
    size, steps : int
    flops_per_pair : int
    watched : ndarray of intp
        Ranks whose steps are kept in full.
    progress : callable
        Told how many steps of all ranks are done, of how many.

    Attributes
    ----------
    records : ndarray of RECORD, shape (watched ranks, steps)
    """

    def __init__(
        self,
        size: int,
        steps: int,
        flops_per_pair: int,
        watched: Ranks,
        progress: Callable[[int, int], None],
    ) -> None:
        self._flops_per_pair = flops_per_pair
        self._size, self._watched = size, watched
        self._progress, self._done, self._all = progress, 0, size * steps
        self._place = np.full(size, -1, np.intp)
        self._place[watched] = np.arange(len(watched))
        self._whole = len(watched) == size
        self.records: Array = np.zeros((len(watched), steps), RECORD)
        for name in (*TILES, *AWAITED):
            if name in QUANTITIES:
                self.records[name] = np.nan
        self._sums = {name: np.zeros(size) for name in SUMMED}
        self._end = np.zeros(size)
        self._sent: Mapping[str, Array] = {}
        self._times = 0

    def step(
        self,
        number: int,
        ranks: Ranks | None,
        moments: Mapping[str, Array],
        load: Load,
        awaited: Callable[[Ranks], tuple[Array, Array]],
    ) -> None:
        """Record that some ranks have ended a step.

        Parameters
        ----------
        number : int
            Of the step.
        ranks : ndarray of intp or None
            None for all of them.
        moments : mapping of str to ndarray of float64, shape of `ranks`
            ``started``, ``compute_done``, ``received``, ``sent`` and ``step_end``; minus infinity where
            nothing was received or sent.
        load : Load
            Of the step, of all ranks.
        awaited : callable
            Returns what some of the ranks, given by their places in `ranks`, waited for longest: the peer,
            and when it posted what it sent; NaN where there is none.
        """
        self._done += self._size if ranks is None else len(ranks)
        self._progress(self._done, self._all)
        if not self._whole:
            self._add(slice(None) if ranks is None else ranks, moments, load)
        kept = self._watched
        if ranks is not None:
            kept = np.flatnonzero(self._place[ranks] >= 0)
        here = kept if ranks is None else ranks[kept]
        rows = self._place[here]
        column = self.records[:, number]
        for name, values in moments.items():
            column[name][rows] = values[kept]
        for name, values in load.sent.items():
            column[name][rows] = values[here]
        column["pairs"][rows] = load.pairs[here]
        if AWAITED[0] in QUANTITIES:
            for name, values in zip(AWAITED, awaited(kept), strict=True):
                column[name][rows] = values

    def finish(self) -> None:
        """Fill in what follows from the rest, when all steps are recorded."""
        for name in ("posted", "launched"):
            self.records[name] = self.records["started"]
        for name in ("received", "sent"):
            self.records[name][np.isneginf(self.records[name])] = np.nan
        self._price(self.records)
        self._count()

    def condensed(self) -> Array:
        """Return the trace of all ranks, shape (ranks, steps), or condensed (ranks, 1)."""
        if self._whole:
            return self.records
        told = np.zeros(self._size, RECORD)
        for name in ("sent", *TILES, *AWAITED):
            if name in QUANTITIES:
                told[name] = np.nan
        told["compute_done"] = self._sums["compute"]
        # Nothing takes time but compute and stall.
        told["received"] = told["step_end"] = self._end
        for name in (*Load.SENT, "pairs"):
            told[name] = self._sums[name]
        self._price(told)
        return told[:, None]

    def _price(self, records: Array) -> None:
        records["computed_pairs"] = records["pairs"]
        records["flops"] = self._flops_per_pair * records["pairs"]

    def _add(self, ranks: Any, moments: Mapping[str, Array], load: Load) -> None:
        """Add to the sums of some ranks."""
        done, sums = moments["compute_done"], self._sums
        everybody = isinstance(ranks, slice)
        if done is not moments["started"]:  # Or nothing is computed at all.
            sums["compute"][ranks] += done - moments["started"]
            sums["pairs"][ranks] += load.pairs[ranks]
        if everybody:
            self._end = moments["step_end"]
        else:
            self._end[ranks] = moments["step_end"]
        if everybody and load.sent is self._sent:
            self._times += 1
            return
        self._count()
        if everybody:
            self._sent, self._times = load.sent, 1
            return
        for name, counts in load.sent.items():
            sums[name][ranks] += counts[ranks]

    def _count(self) -> None:
        """Add what all ranks have sent, alike in several steps."""
        for name, counts in self._sent.items():
            self._sums[name] += self._times * counts
        self._sent = {}
