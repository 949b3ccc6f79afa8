"""Every parameter of a run, declared once.

`Experiment` is the single source of the command line, of TOML files and of the record in the result
file: an option is a field here, its default stands here, and its rule is checked here, before anything
is communicated, so that every rank refuses alike.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ringmpi.comm.link import network_of
from ringmpi.comm.policy import CHUNK_LIMIT, PROGRESS, TRANSPORTS, check_timeout, chosen_transport
from ringmpi.devices import (
    CUDA,
    DEVICES,
    MATRIX_UNIT,
    MAX_HEAD_DIM,
    PACED,
    check_device,
    check_matrix_unit,
    check_pace,
)
from ringmpi.digits import whole_number
from ringmpi.encoding import numpy_dtype
from ringmpi.errors import ConfigError, check_choice
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.mask import Mask
from ringmpi.schedule import GROUP_OPTIONS, METHODS, Pass, Shards, Step
from ringmpi.softmax import DTYPES, WEIGHTS, check_scale, check_weights
from ringmpi.tensors import Shape

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


#: Characters of an input file's name that a result's name repeats; names end at 255 bytes.
LONGEST_STEM = 60

#: How the ranks write the result, see `writing`.
IO = ("gather", "shards", "mpio")

#: Up to here float64 counts exactly, and positions fit into 64 bits with room for sums.
LARGEST = 2**53


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _ranks_or_auto(text: str) -> int | None:
    """Return a number of ranks; None for ``auto``, which the job finds out."""
    return None if text == "auto" else int(text)


def _option(
    default: Any,
    kind: Callable[[str], Any],
    help_text: str,
    *,
    metavar: str = "",
    choices: Iterable[str] = (),
) -> Any:
    """Declare an option: how its text is read, and what a person is told about it."""
    told = {"kind": kind, "help": help_text, "metavar": metavar, "choices": tuple(choices)}
    return field(default=default, metadata=told)


@dataclass(frozen=True)
class Experiment:
    """One run, all parameters resolved.

    Made by `experiment_from`, which fills in what an input file says.

    Raises
    ------
    ConfigError
        If a parameter breaks a rule.
    """

    seq_len: int = _option(0, int, "length of generated inputs", metavar="N")
    input: str | None = _option(
        None,
        str,
        "HDF5 file with /q /k /v [batch, heads, tokens, head_dim] and optionally /documents",
        metavar="FILE",
    )
    query_len: int | None = _option(
        None, int, "only the last M positions attend, to all N keys [all of them]", metavar="M"
    )
    batch: int = _option(1, int, "sequences", metavar="B")
    heads: int = _option(8, int, "query heads", metavar="H")
    kv_heads: int = _option(0, int, "key and value heads [as many as query heads]", metavar="K")
    head_dim: int = _option(64, int, "width of a head", metavar="D")
    dtype: str = _option("float32", str, "of q, k and v; an input file is converted", choices=DTYPES)
    causal: bool = _option(False, bool, "a query sees no key after itself")
    window: int | None = _option(
        None,
        int,
        "previous keys visible beside the own one; later ones are up to --causal",
        metavar="W",
    )
    documents: tuple[int, ...] | None = _option(
        None, _integers, "cumulative offsets, 0 to N; a query sees its document", metavar="0,I,..,N"
    )
    softmax_scale: float | None = _option(
        None, float, "factor of the scores [head_dim ** -0.5]", metavar="X"
    )
    layout: str = _option("contiguous", str, "which positions a rank owns", choices=LAYOUTS)
    method: str = _option("ring", str, "how the blocks travel", choices=METHODS)
    ulysses_degree: int | None = _option(
        None,
        _ranks_or_auto,
        "hybrid: neighbouring ranks that share heads; auto takes the ranks of a node [auto]",
        metavar="U",
    )
    inner: int | None = _option(
        None,
        _ranks_or_auto,
        "double-ring: neighbouring ranks of an inner ring; auto takes the ranks of a node [auto]",
        metavar="W",
    )
    backward: bool = _option(False, bool, "the backward pass too: dq, dk and dv")
    device: str = _option("auto", str, "what computes", choices=("auto", *DEVICES))
    threads: int = _option(1, int, "of the native device, a rank", metavar="T")
    matrix_unit: str = _option(
        "auto",
        str,
        "the native device's use of the CPU's matrix unit for bfloat16",
        choices=MATRIX_UNIT,
    )
    weights: str = _option(
        "exact",
        str,
        "softmax weights stay float32, or may be rounded to the 16-bit dtype where that is faster",
        choices=WEIGHTS,
    )
    flops: float | None = _option(
        None,
        float,
        "paced device: FLOP/s of a rank, such as 50e12; it takes the time and computes nothing",
        metavar="F",
    )
    slow: str | None = _option(
        None,
        str,
        "paced device: ranks that take FACTOR times as long, such as 2:2.5,5:1.5",
        metavar="RANK:FACTOR,..",
    )
    progress: str = _option(
        "poll",
        str,
        "who calls MPI while the device computes: a helper thread, the rank between tiles, or nobody",
        choices=PROGRESS,
    )
    transport: str = _option("auto", str, "how blocks get from the device to MPI", choices=TRANSPORTS)
    link: str | None = _option(
        None,
        str,
        "emulated link between each two ranks, such as 100Mbit/s,1ms; with ,shared one for each rank",
        metavar="RATE,LATENCY",
    )
    link_map: str | None = _option(
        None,
        str,
        "emulated links by topology, such as 4:200Gbit/s,1us:25Gbit/s,5us,shared:2-3=1Gbit/s,1ms: in a node "
        "of 4 ranks, between nodes, from rank 2 to rank 3",
        metavar="RANKS_PER_NODE:INTRA:INTER[:A-B=LINK]..",
    )
    repeats: int = _option(3, int, "timed passes", metavar="R")
    warmup: int = _option(1, int, "passes before the timed ones", metavar="R")
    seed: int = _option(0, int, "of generated inputs and of sampled rows", metavar="S")
    timeout: float = _option(
        60.0, float, "seconds without progress after which ranks ask who is stuck", metavar="T"
    )
    ranks: int | None = _option(None, int, "refuse to run at any other size", metavar="P")
    check_transfers: bool = _option(False, bool, "checksum every block at every hop")
    chunk_limit: int = _option(CHUNK_LIMIT, int, "bytes of the largest MPI message", metavar="BYTES")
    verify: str = _option("full", str, "full, sample:ROWS or none", metavar="HOW")
    store_inputs: bool = _option(False, bool, "put q, k and v into the result file too")
    io: str = _option(
        "gather",
        str,
        "who writes q, k, v and results: rank 0, every rank a file of its own, or all one by parallel HDF5",
        choices=IO,
    )
    output: str | None = _option(None, str, "result file [results/<name>.h5]", metavar="FILE")

    def __post_init__(self) -> None:
        for name, declared in options().items():
            if declared.metadata["choices"]:
                check_choice(name, getattr(self, name), declared.metadata["choices"])
        _check_numbers(self)
        check_device(self.device, self.threads, self.matrix_unit)
        check_matrix_unit(self.matrix_unit, self.dtype)
        check_weights(self.weights, self.dtype)
        check_pace(self.device, self.flops, self.slow)
        if self.device not in ("auto", CUDA):
            chosen_transport(self.transport, self.device, "")
        _check_computes(self)
        Mask(self.causal, self.window, self.documents)
        network_of(self.link, self.link_map)
        verify_rows(self.verify)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads={self.heads} with kv_heads={self.kv_heads}: kv_heads must divide heads"
            )
        if self.documents is not None and self.documents[-1] != self.seq_len:
            raise ConfigError(
                f"documents={_shown(self.documents)}: the last offset must be the length of the "
                f"sequence, {self.seq_len}"
            )

    @property
    def computes(self) -> bool:
        """Whether results are computed, so that there are inputs, outputs and a verdict."""
        return self.device != PACED

    @property
    def group_ranks(self) -> int | None:
        """How many ranks an inner group of the method has, if it was said."""
        option = GROUP_OPTIONS.get(self.method)
        given: int | None = getattr(self, option) if option else None
        return given

    @property
    def num_queries(self) -> int:
        """How many positions attend: the last ones of the sequence."""
        return self.seq_len if self.query_len is None else self.query_len

    @property
    def shape(self) -> Shape:
        """Batch, heads, head_dim and dtype."""
        dtype = numpy_dtype(self.dtype)
        return Shape(self.batch, self.heads, self.kv_heads, self.head_dim, dtype)

    @property
    def name(self) -> str:
        """What the run is, in a few words that a file can be called by."""
        source = Path(self.input).stem[:LONGEST_STEM] if self.input else f"n{self.seq_len}"
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}-{self.kv_heads}"
        queries = [f"q{self.query_len}"] if self.query_len is not None else []
        words = [
            self.method,
            source,
            *queries,
            f"b{self.batch}",
            heads,
            f"d{self.head_dim}",
            self.dtype,
        ]
        words += ["causal"] if self.causal else []
        words += [f"w{self.window}"] if self.window is not None else []
        words += ["documents"] if self.documents else []
        words += ["backward"] if self.backward else []
        words += [self.weights] if self.weights != "exact" else []
        words += [] if self.computes else [PACED]
        return "-".join([*words, self.layout])

    def layouts(self, size: int) -> dict[str, Layout]:
        """Return which of `size` ranks owns which positions, of every tensor by name."""
        keys = Layout(self.layout, self.seq_len, size)
        queries = Layout(self.layout, self.num_queries, size, self.seq_len - self.num_queries)
        of_keys = dict.fromkeys(("k", "v", "dk", "dv"), keys)
        return of_keys | dict.fromkeys(("q", "dout", "out", "lse", "dq"), queries)

    def schedules(self, size: int, inner: int, direction: Pass) -> list[list[Step]]:
        """Return the schedule of every one of `size` ranks, in groups of `inner`."""
        layouts = self.layouts(size)
        shards = (Shards(layouts["k"], layouts["q"], rank, inner) for rank in range(size))
        return [METHODS[self.method](mine, direction) for mine in shards]

    def file_name(self, size: int) -> str:
        """Return a name for the result on `size` ranks; no two experiments share one."""
        record = json.dumps(replace(self, output=None, ranks=None).record(), sort_keys=True)
        digest = hashlib.sha256(record.encode()).hexdigest()[:8]
        return f"{self.name}-{digest}-p{size}.h5"

    def record(self) -> dict[str, Any]:
        """Return all parameters by option name, fit for JSON."""
        return asdict(self)


def options() -> dict[str, Field[Any]]:
    """Return the declared options by name."""
    return {declared.name: declared for declared in fields(Experiment)}


def verify_rows(verify: str) -> int | None:
    """Return how many rows a ``--verify`` value asks for; None for all of them.

    Raises
    ------
    ConfigError
        If it is none of ``full``, ``sample:ROWS`` and ``none``.

    Examples
    --------
    >>> verify_rows("sample:16"), verify_rows("none"), verify_rows("full")
    (16, 0, None)
    """
    if verify in ("full", "none"):
        return None if verify == "full" else 0
    kind, _, text = verify.partition(":")
    rows = whole_number(text)
    if kind != "sample" or not rows:
        raise ConfigError(f"verify={verify!r}: use full, sample:ROWS (such as sample:256) or none")
    return rows


def experiment_from(given: Mapping[str, Any], found: Mapping[str, Any] | None = None) -> Experiment:
    """Make an experiment of the options that somebody gave.

    Parameters
    ----------
    given : mapping
        Options by name, without those left at their default.
    found : mapping, optional
        What the input file says of itself. An option may repeat it but not contradict it, apart from
        `dtype`, which asks for a conversion.

    Raises
    ------
    ConfigError
        If an option is unknown, contradicts the input file, or breaks a rule.
    """
    values = dict(given)
    for name in values:
        if name not in options():
            nearest = get_close_matches(name, options(), n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(f"{name}: no such option{hint}")
    if ("seq_len" in values) == ("input" in values) and found is None:
        raise ConfigError("give either --seq-len N, for generated inputs, or --input FILE")
    for name, value in (found or {}).items():
        if name != "dtype" and values.setdefault(name, value) != value:
            raise ConfigError(
                f"{name}={_shown(values[name])}: {values.get('input')} has {name}={_shown(value)}; "
                f"leave the option away"
            )
    values.setdefault("dtype", (found or {}).get("dtype", options()["dtype"].default))
    if not values.get("kv_heads"):
        values["kv_heads"] = values.get("heads", options()["heads"].default)
    if values.get("device") == PACED:
        values.setdefault("verify", "none")
    return Experiment(**values)


def experiment_of_record(record: Any) -> Experiment:
    """Return the experiment of a record that `Experiment.record` made and JSON has kept.

    Raises
    ------
    ConfigError
        If it is no such record. It may lack options that an older ringmpi did not have.
    """
    if not isinstance(record, dict):
        raise ConfigError("it is no table of options")
    values: dict[str, Any] = {}
    for name, value in record.items():
        if name not in options():
            raise ConfigError(f"{name}: no such option")
        absent = value is None and options()[name].default is None
        values[name] = None if absent else _from_toml("record", name, value)
    return Experiment(**values)


def read_toml(path: str) -> dict[str, Any]:
    """Return the options that a TOML file gives, by name.

    Raises
    ------
    ConfigError
        If it cannot be read, is not TOML, or gives a value of the wrong type.
    """
    try:
        table = tomllib.loads(text_of(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"config={path}: {' '.join(str(error).split())}") from error
    values: dict[str, Any] = {}
    for name, value in table.items():
        option = name.replace("-", "_")
        if option in values:
            raise ConfigError(f"config={path}: {option} is given twice")
        values[option] = _from_toml(path, name, value)
    return values


def text_of(path: str) -> str:
    """Return the text of a file that somebody wrote by hand. Local.

    Raises
    ------
    OSError
        If it is no file: a device may have no end.
    ValueError
        If it is no text.
    """
    found = Path(path)
    if found.exists() and not found.is_file():
        raise OSError("is no file")
    return found.read_text("utf-8")


def _from_toml(path: str, name: str, value: Any) -> Any:
    declared = options().get(name.replace("-", "_"))
    kind = declared.metadata["kind"] if declared else type(value)
    if kind is _integers:
        if not isinstance(value, list):
            raise ConfigError(f"{path}: {name}={value!r}: must be a list of whole numbers")
        value = ",".join(map(str, value))
    elif kind is _ranks_or_auto:
        if value != "auto" and type(value) is not int:
            raise ConfigError(f"{path}: {name}={value!r}: must be a whole number or 'auto'")
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise ConfigError(f"{path}: {name}={value!r}: must be {words[kind]}")
    return parse(name, value) if isinstance(value, str) else value


def parse(name: str, text: str) -> Any:
    """Return the value of an option from its text.

    Raises
    ------
    ConfigError
        If the text is not of the option's kind.
    """
    declared = options().get(name.replace("-", "_"))
    if declared is None:
        return text
    kind = declared.metadata["kind"]
    try:
        return kind(text)
    except ValueError as error:
        words = {
            int: "a whole number",
            float: "a number",
            _integers: "whole numbers like 0,512,769",
            _ranks_or_auto: "a whole number or auto",
        }
        raise ConfigError(f"{name}={text!r}: must be {words[kind]}") from error


def _check_numbers(experiment: Experiment) -> None:
    """Check every number against its range."""
    for name, declared in options().items():
        value = getattr(experiment, name)
        if declared.metadata["kind"] is int and value is not None and value > LARGEST:
            raise ConfigError(f"{name}={value}: must be at most 2**53")
        if value == "":
            raise ConfigError(f"{name}: is empty; give a name, or leave the option away")
    at_least_one = ("seq_len", "batch", "heads", "kv_heads", "repeats", "chunk_limit")
    for name in (*at_least_one, "query_len", "ranks", "ulysses_degree", "inner"):
        value = getattr(experiment, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be 1 or more")
    if experiment.num_queries > experiment.seq_len:
        raise ConfigError(
            f"query_len={experiment.query_len}: the sequence has {experiment.seq_len} positions, the "
            f"last of which are the queries"
        )
    for name in ("warmup", "seed"):
        if getattr(experiment, name) < 0:
            raise ConfigError(f"{name}={getattr(experiment, name)}: must be 0 or more")
    if not 1 <= experiment.head_dim <= MAX_HEAD_DIM:
        raise ConfigError(f"head_dim={experiment.head_dim}: must be from 1 to {MAX_HEAD_DIM}")
    check_timeout(experiment.timeout)
    check_scale(experiment.softmax_scale, numpy_dtype(experiment.dtype))


def _check_computes(experiment: Experiment) -> None:
    """Refuse to round, verify or store what a paced device does not compute."""
    if experiment.computes:
        return
    if experiment.verify != "none":
        raise ConfigError(
            f"verify={experiment.verify} with device={PACED}: it computes nothing that could be verified; "
            f"use none, which is its default"
        )
    if experiment.io != "gather":
        raise ConfigError(
            f"io={experiment.io} with device={PACED}: it computes nothing to be written; leave it away"
        )
    if experiment.weights != "exact":
        raise ConfigError(
            f"weights={experiment.weights} with device={PACED}: it has none; leave it away"
        )
    if experiment.store_inputs:
        raise ConfigError(f"store_inputs with device={PACED}: it is given no inputs; leave it away")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
