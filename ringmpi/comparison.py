r"""The bounds: a result may differ from the reference by no more than rounding explains.

With ``ref`` the float64 reference and ``single`` the plain single-pass result in the dtype of the state (for
float64 in another order of summation),
every element must satisfy

.. math:: |x_i - ref_i| \le 2 \max|single - ref| + 4 \epsilon \, size + r_i

where :math:`\epsilon` is that of the state's dtype and :math:`r_i` half a unit in the last place of
``ref_i`` if the result is rounded once to 16 bits, else 0. The factor 2 is flash-attention's rule: no more
than twice the error that an honest single pass makes in the same arithmetic; the second term is a floor for
inputs on which that pass happens to be exact, from the size of what was summed:

* ``out``: the largest ``|v|``;
* ``lse``, which is not an average of values: the largest ``|lse|``, at least 1;
* ``dv``: the largest ``|ref|``;
* ``dq`` and ``dk``: the largest ``|ref|``, but at least
  :math:`scale \, |dout| |v| / \sqrt{d} \, \max|k|` (for ``dk``, ``max|q|``), where ``|dout|`` and ``|v|`` are
  the lengths of the longest rows. Both sum differences :math:`dout_i \cdot v_j - \delta_i`, which vanish
  where a row sees one key or equal values; what is left is the rounding of two dot products, and by chance
  none of it in one of two honest passes.

An element-wise rounding term is far stricter for 16-bit results than one bound of their own epsilon: a
lost key is seen.

The mean error has a bound of its own, since the last rounding hides in the maximum what a coarse accumulator
does to the mean: 1.05 times the mean error of ``single`` after the same rounding for 16-bit results (that
rounding dominates, so the mean must be flat over rank counts), twice it otherwise, plus one epsilon of the
mean size: of ``|ref|``, at least 1 for ``lse``, at least the size above for ``dq`` and ``dk``, with root mean
squares instead of maxima. The mean of n errors, each within the bound of an element, varies by that bound
over :math:`\sqrt n`, which is added: it matters for a handful of sampled rows only. NaN never passes.

Where weights may be rounded to the dtype of the inputs, with d binary digits, the single pass rounds them
too, and :math:`2^{-d} \, size` is added for all but ``lse``, which is no product of theirs. For ``out`` that
is all that rounding can do: each weight changes by :math:`2^{-d}` of itself at most, so their average of
values by that part of the largest one. A ring rounds other numbers than a single pass, as it knows other
maxima.

How a 16-bit ``out`` was rounded is taken from the result: a backward pass is given it so, and forms
:math:`\delta` from it. The gradients, ``ref`` and ``single`` alike, are therefore those for that ``out``,
as far as its elements are neighbours of the exact ones. Else that rounding would be most of the error of
``dq`` and ``dk``, of the single pass too, and widen their bounds a thousandfold. What remains is float32
arithmetic and one rounding, as for ``out``, so that the factor 1.05 holds for gradients too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.layout import Layout
from ringmpi.softmax import SIGNIFICANT_DIGITS

Array = NDArray[Any]


@dataclass
class Verdict:
    """What was found of one tensor.

    Attributes
    ----------
    tensor : str
    passed : bool
    max_abs, mean_abs : float
        Error against the reference.
    beyond : float
        The largest error beyond the last rounding of its own element; `max_abs` where none is rounded again.
    bound, mean_bound : float
        What is allowed for `beyond` and `mean_abs`.
    single_max, single_mean : float
        Error of the plain single pass, rounded like the output.
    rows : int
        Rows compared, over batch and heads.
    index : list of int
        Batch, head, global token (and column) of the worst element.
    rank : int
        The rank that owns it.
    found, expected : float
        Its two values.
    """

    tensor: str
    passed: bool
    max_abs: float
    mean_abs: float
    beyond: float
    bound: float
    mean_bound: float
    single_max: float
    single_mean: float
    rows: int
    index: list[int]
    rank: int
    found: float
    expected: float

    def record(self) -> dict[str, Any]:
        """Return everything by name."""
        return asdict(self)

    def failure(self) -> str:
        """Return where and by how much it fails, in one line."""
        kind = "element" if not self.beyond <= self.bound else "mean"
        if not np.isfinite(self.bound + self.mean_bound):
            kind = "bound (a plain single pass is not finite either, so nothing is allowed)"
        return (
            f"{self.tensor}{self.index} of rank {self.rank}: found {self.found:.9g}, expected "
            f"{self.expected:.9g}; {kind} out of bounds: error beyond rounding {self.beyond:.3g} "
            f"(allowed {self.bound:.3g}), mean {self.mean_abs:.3g} (allowed {self.mean_bound:.3g})"
        )


@dataclass
class Comparison:
    """Errors of one tensor, added up over the parts that are compared on their own.

    Attributes
    ----------
    tensor : str
    scale : float
        The size of what was summed; set beside `add`.
    """

    tensor: str
    rows: int = 0
    count: int = 0
    error_sum: float = 0.0
    single_sum: float = 0.0
    size_sum: float = 0.0
    largest: float = 0.0
    beyond: float = -np.inf
    single_error: float = 0.0
    single_largest: float = 0.0
    scale: float = 0.0
    worst: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        found: Array,
        exact: Array,
        single: Array,
        place: Callable[[Any], Any],
        least: float = 0.0,
    ) -> None:
        """Compare a part.

        Parameters
        ----------
        found, exact, single : ndarray of one shape
            The result, the reference, and the single pass in the dtype of the state.
        place : callable
            Turns an index of the part into one of the whole tensor.
        least : float
            The size of an element that the mean bound counts with at least.
        """
        if not found.size:
            return
        with np.errstate(over="ignore"):
            rounded = single.astype(found.dtype)
        error, single_error = _error(found, exact), _error(rounded, exact)
        rounding = rounding_of(exact, found.dtype, single.dtype)
        beyond = error - rounding
        at = np.unravel_index(int(np.argmax(beyond)), beyond.shape)
        if beyond[at] > self.beyond:
            self.beyond = float(beyond[at])
            self.worst = {
                "index": place(at),
                "found": float(found[at]),
                "expected": float(exact[at]),
            }
        self.rows += len(found)
        self.count += found.size
        self.error_sum += float(error.sum())
        self.single_sum += float(single_error.sum())
        self.size_sum += float(_size(exact, least).sum())
        self.largest = max(self.largest, float(error.max()))
        self.single_largest = max(self.single_largest, float(single_error.max()))
        self.single_error = max(self.single_error, float(_error(single, exact).max()))

    def merge(self, other: Comparison) -> None:
        """Take in what was compared elsewhere."""
        for name in ("rows", "count", "error_sum", "single_sum", "size_sum"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.beyond > self.beyond:
            self.beyond, self.worst = other.beyond, other.worst
        for name in ("largest", "single_error", "single_largest", "scale"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def verdict(
        self, out_dtype: np.dtype[Any], state: np.dtype[Any], layout: Layout, weights: str = "exact"
    ) -> Verdict:
        """Hold the errors against the bounds.

        Parameters
        ----------
        out_dtype, state : dtype
            Of the result, ``lse`` apart, and of the state.
        layout : Layout
            Says who owns a token of this tensor.
        weights : str
            Whether they were ``rounded``.
        """
        eps = float(np.finfo(state).eps)
        allowed = 2 * self.single_error + 4 * eps * self.scale
        if weights == "rounded" and self.tensor != "lse":
            allowed += 2.0 ** -SIGNIFICANT_DIGITS[out_dtype.name] * self.scale
        once_rounded = self.tensor != "lse" and out_dtype.itemsize < state.itemsize
        factor = 1.05 if once_rounded else 2.0
        mean, single_mean = self.error_sum / self.count, self.single_sum / self.count
        mean_bound = factor * single_mean + eps * self.size_sum / self.count + allowed / self.count**0.5
        # Comparisons that NaN fails. A single pass that is itself not finite bounds nothing.
        bounded = bool(np.isfinite(allowed) and np.isfinite(mean_bound))
        passed = bounded and bool(self.beyond <= allowed and mean <= mean_bound)
        return Verdict(
            tensor=self.tensor,
            passed=passed,
            max_abs=self.largest,
            mean_abs=mean,
            beyond=self.beyond,
            bound=allowed,
            mean_bound=mean_bound,
            single_max=self.single_largest,
            single_mean=single_mean,
            rows=self.rows,
            rank=layout.owner(self.worst["index"][2])[0],
            **self.worst,
        )


def largest_of(array: Array) -> float:
    """Return the largest ``|value|`` of those that are finite; 0 if there is none. Local."""
    return float(np.abs(array[np.isfinite(array)], dtype=np.float64).max(initial=0))


@dataclass
class Sizes:
    """How large the rows of a tensor are, as far as they were told. Values that are not finite are left out.

    Attributes
    ----------
    largest, longest : float
        The largest ``|value|``, the longest row.
    """

    largest: float = 0.0
    longest: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, rows: Array) -> Sizes:
        """Take in some rows, shape (rows, head_dim), and return itself."""
        wide = rows.astype(np.float64)
        finite = np.where(np.isfinite(wide), wide, 0)
        squares = (finite**2).sum(axis=1)
        self.largest = max(self.largest, float(np.abs(finite).max(initial=0)))
        self.longest = max(self.longest, float(squares.max(initial=0)) ** 0.5)
        self.squares += float(squares.sum())
        self.count += finite.size
        return self

    @property
    def rms(self) -> float:
        """The root of the mean square of all values."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0


def gradient_sizes(
    scale: float, width: int, dout: Sizes, v: Sizes, other: Sizes
) -> tuple[float, float]:
    """Return how large elements of dq or dk are, if nothing in them cancels. Local.

    Parameters
    ----------
    scale : float
        Factor of the scores.
    width : int
        The head_dim.
    dout, v, other : Sizes
        `other` is k for dq, q for dk.

    Returns
    -------
    largest, typical : float
        A dot product of two rows of random signs is their lengths' product over the root of `width`.
    """
    root = float(width) ** 0.5
    largest = dout.longest * v.longest / root * other.largest
    return abs(scale) * largest, abs(scale) * root * dout.rms * v.rms * other.rms


def _size(exact: Array, least: float) -> Array:
    """Return ``|exact|``, at least `least`; 0 where it is not finite."""
    return np.where(np.isfinite(exact), np.maximum(np.abs(exact), least), 0)


def _error(found: Array, exact: Array) -> Array:
    """Return ``|found - exact|``; 0 where both are the same infinity, infinite where either is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(found.astype(np.float64) - exact)
    error[found.astype(np.float64) == exact] = 0
    error[np.isnan(error)] = np.inf
    return np.asarray(error)


def rounding_of(exact: Array, out: np.dtype[Any], state: np.dtype[Any]) -> Array:
    """Return half a unit in the last place of `out` at each exact value; 0 if it is not rounded again.

    Local.
    """
    if out.itemsize >= state.itemsize:
        return np.zeros(exact.shape)
    import ml_dtypes

    info = ml_dtypes.finfo(out)  # type: ignore[no-untyped-call]  # ml_dtypes types only part of itself
    size = np.maximum(np.abs(np.nan_to_num(exact)), float(info.smallest_normal))
    # The state's own error may push a value over a power of two, where the unit doubles; frexp of a
    # value just below it gives the smaller unit, so one more ulp of the state is added.
    _, exponent = np.frexp(size * (1 + float(np.finfo(state).eps)))
    return np.asarray(np.ldexp(0.5, exponent - 1 - int(info.nmant)))
