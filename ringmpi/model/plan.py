"""What to expect of a problem on a machine, before anybody has run it.

Puts together what the other rooms here know: from which length on a ring hides its transfers, what a rank
must hold, FLOPs, the longest context that fits, and which method is fastest. Times are of attention in one
layer; memory is of whole transformers. All numbers are in seconds, bytes, FLOPs and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from ringmpi.config import Experiment, experiment_from
from ringmpi.errors import ConfigError
from ringmpi.layout import Layout
from ringmpi.model.costs import allowed_share, attention_flops, hop_nbytes, least_queries
from ringmpi.model.machine import Machine, read_machine
from ringmpi.model.memory import ARCHITECTURES, LONGEST, Activations, Setting, activations
from ringmpi.model.predict import Prediction, predict
from ringmpi.model.prices import Task
from ringmpi.model.transformer import Transformer, plain, published
from ringmpi.schedule import GROUP_OPTIONS, METHODS, Pass, check_heads, inner_ranks
from ringmpi.schedule.steps import Part, Payload

#: Ranks where nobody says how many: those of the usual node.
RANKS = 8

#: Tokens a rank where nobody says how many, as in the comparisons of github.com/SandAI-org/MagiAttention.
TOKENS_A_RANK = 8192

#: Options of an experiment that a plan heeds.
PLANNED = (
    "seq_len",
    "query_len",
    "batch",
    "heads",
    "kv_heads",
    "head_dim",
    "dtype",
    "causal",
    "layout",
    "ulysses_degree",
    "inner",
    "backward",
    "ranks",
)

#: Masks that are not priced, and inputs that are not looked at.
UNPLANNED = ("window", "documents", "input")

#: Times that differ by less than this part are equal, and waits below it none: models are not that exact.
NOTHING = 1e-3

#: What lies on a rank beside the slots of a schedule, in each pass.
OWN = {
    Pass.FORWARD: (Payload.Q, Payload.KV, Payload.STATE, Payload.OUT),
    Pass.BACKWARD: (Payload.QDOUT, Payload.KV, Payload.OUT, Payload.DQ, Payload.DKV),
}


@dataclass(frozen=True)
class Threshold:
    """From which length on a ring hides its transfers over one kind of link.

    Attributes
    ----------
    link : str
    direction : Pass
    ratio : float
        F / B in tokens for 16 bits: FLOP/s of the largest block over bytes a second of the largest message.
    factor : float
        What grouped heads, dtype, mask and pass make of it.
    tokens : float
        ``factor * ratio``: query tokens a rank that hide the transfer, without latency.
    with_latency : int or None
        The same with latency, and rates of that length; None if no length does.
    hidden : bool
        Whether the queries of this plan do.
    """

    link: str
    direction: Pass
    ratio: float
    factor: float
    tokens: float
    with_latency: int | None
    hidden: bool


@dataclass(frozen=True)
class Holding:
    """What an architecture holds on a rank.

    Attributes
    ----------
    architecture : str
    layer : Activations
    held_nbytes : int
        All that a rank holds for the context of this plan.
    longest : int
        Tokens of the longest context that fits.
    """

    architecture: str
    layer: Activations
    held_nbytes: int
    longest: int


@dataclass(frozen=True)
class Candidate:
    """A method, and what it is predicted to take.

    Attributes
    ----------
    method : str
    inner : int
        Ranks of an inner group; 1 for methods without.
    passes : mapping
        By pass; empty if the method cannot be used.
    held_nbytes : int
        Of the rank with most, in the pass with most: buffers and the rank's own tensors.
    fits : bool
        Whether that fits into its memory.
    why_not : str
        Why the method cannot be used.
    """

    method: str
    inner: int
    passes: Mapping[Pass, Prediction]
    held_nbytes: int = 0
    fits: bool = False
    why_not: str = ""

    @property
    def seconds(self) -> float:
        """Of all passes together."""
        return sum(prediction.seconds for prediction in self.passes.values())

    @property
    def waiting(self) -> float:
        """Seconds that the rank with most work waits."""
        return sum(prediction.waiting for prediction in self.passes.values())


@dataclass(frozen=True)
class Plan:
    """All that is said about a problem on a machine.

    Attributes
    ----------
    machine : Machine
    experiment : Experiment
    model : Transformer
    ranks : int
    pairs : int
        Allowed pairs of query and key.
    flops : mapping
        Of attention in one layer, by pass.
    matrix_flops : mapping
        Of all but attention in all layers, by pass.
    share : float
        Of a block's pairs that are allowed at the busiest rank of each step.
    thresholds : tuple of Threshold
    holdings : tuple of Holding
    candidates : tuple of Candidate
    balanced : Candidate or None
        The best of all methods with zigzag shards, where contiguous ones leave ranks without work.
    """

    machine: Machine
    experiment: Experiment
    model: Transformer
    ranks: int
    pairs: int
    flops: Mapping[Pass, int]
    matrix_flops: Mapping[Pass, int]
    share: float
    thresholds: tuple[Threshold, ...]
    holdings: tuple[Holding, ...]
    candidates: tuple[Candidate, ...]
    balanced: Candidate | None

    @property
    def ranking(self) -> list[Candidate]:
        """The methods that fit, best first."""
        return _ranked(self.candidates)

    @property
    def reason(self) -> str:
        """Why the first of the ranking is."""
        if not self.ranking:
            return "no method fits into the memory of a rank; use more ranks or fewer tokens"
        best, *others = self.ranking
        # A method whose groups are of one rank, or of all, is another one.
        others = [other for other in others if other.passes != best.passes]
        share = best.waiting / best.seconds
        if share < NOTHING:
            told = "its compute hides all transfers"
        else:
            told = f"the busiest rank waits {share:.1%} of the time"
        if not others:
            return told
        more = others[0].seconds / best.seconds - 1  # Below 0 if the simpler of two equals is the best.
        equal = f"{others[0].method} takes as long and is less simple"
        return f"{told}; " + (
            equal if more < NOTHING else f"{others[0].method} takes {more:.1%} longer"
        )

    def record(self) -> dict[str, Any]:
        """Return everything by name, fit for JSON."""
        return {
            "machine": self.machine.name,
            "experiment": {name: getattr(self.experiment, name) for name in PLANNED},
            "transformer": asdict(self.model) | {"parameters": self.model.parameters},
            "ranks": self.ranks,
            "pairs": self.pairs,
            "flops": _by_pass(self.flops),
            "matrix_flops": _by_pass(self.matrix_flops),
            "allowed_share": self.share,
            "thresholds": [asdict(row) | {"direction": row.direction.value} for row in self.thresholds],
            "memory": [
                asdict(row) | {"layer": asdict(row.layer) | {"total": row.layer.total}}
                for row in self.holdings
            ],
            "methods": [_told(candidate) for candidate in self.candidates],
            "best": self.ranking[0].method if self.ranking else None,
            "reason": self.reason,
            "with_zigzag": None if self.balanced is None else _told(self.balanced),
        }


def plan_from(
    given: Mapping[str, Any],
    machine_name: str,
    model_name: str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
) -> Plan:
    """Make the plan that some options ask for. Local.

    Parameters
    ----------
    given : mapping
        Options of an experiment by name, without those left at their default. `dtype` is then the first that
        the machine has rates for, `ranks` is `RANKS`, `seq_len` `TOKENS_A_RANK` a rank.
    machine_name : str
        Of a built-in machine, or a file.
    model_name : str, optional
        Of a published transformer, from which heads, kv_heads and head_dim are taken unless given.
    layers, hidden : int, optional
        Of a plain transformer where no `model_name` is given: 1, and heads times head_dim.

    Raises
    ------
    ConfigError
        If an option breaks a rule, or the machine lacks what is needed.
    """
    machine = read_machine(machine_name)
    for name in UNPLANNED:
        if given.get(name) is not None:
            raise ConfigError(
                f"{name}={given[name]}: a plan knows full and causal masks of --seq-len tokens"
            )
    for name, number in (("layers", layers), ("hidden", hidden)):
        if number is not None and model_name is not None:
            raise ConfigError(f"{name}={number}: model={model_name} says it; leave one of the two away")
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number}: must be 1 or more")
    values = dict(given)
    if model_name is not None:
        model = published(model_name)
        values = {name: getattr(model, name) for name in ("heads", "kv_heads", "head_dim")} | values
    values.setdefault("dtype", next(iter(machine.compute)))
    values.setdefault("ranks", RANKS)
    # Checked below like every other option; until then it may be anything.
    values.setdefault("seq_len", TOKENS_A_RANK * max(1, values["ranks"]))
    experiment = experiment_from(values)
    if model_name is None:
        heads, width = experiment.heads, experiment.head_dim
        model = plain(layers or 1, hidden or heads * width, heads, experiment.kv_heads, width)
    return make_plan(experiment, machine, model)


def make_plan(experiment: Experiment, machine: Machine, model: Transformer) -> Plan:
    """Make the plan of an experiment. Local.

    Parameters
    ----------
    experiment : Experiment
        With `ranks`.
    machine : Machine
    model : Transformer

    Raises
    ------
    ConfigError
        If the machine has no rates for the dtype, or no links for the ranks.
    """
    ranks = experiment.ranks
    assert ranks is not None
    machine.check_ranks(ranks)
    machine.rates(experiment.dtype)
    task = _task(experiment, experiment.layout)
    passes = (Pass.FORWARD, Pass.BACKWARD) if experiment.backward else (Pass.FORWARD,)
    tokens = experiment.batch * experiment.num_queries
    setting = Setting(
        model, ranks, experiment.batch, task.shape.dtype.itemsize, training=experiment.backward
    )
    plan = Plan(
        machine=machine,
        experiment=experiment,
        model=model,
        ranks=ranks,
        pairs=task.pairs,
        flops={way: attention_flops(task.shape, task.pairs, way) for way in Pass},
        matrix_flops={way: model.matrix_flops(tokens, way) for way in Pass},
        share=allowed_share(task.causal, task.keys, task.queries),
        thresholds=tuple(
            threshold(task, machine, experiment.dtype, kind, way)
            for way in Pass
            for kind in machine.kinds(ranks)
        ),
        holdings=tuple(
            Holding(
                architecture,
                activations(
                    architecture,
                    model,
                    experiment.seq_len,
                    -(-experiment.seq_len // ranks),
                    experiment.batch,
                    task.shape.dtype.itemsize,
                ),
                setting.held_nbytes(architecture, experiment.seq_len),
                setting.longest_context(architecture, machine.memory),
            )
            for architecture in ARCHITECTURES
        ),
        candidates=_candidates(task, experiment, machine, passes),
        balanced=None,
    )
    if not (experiment.causal and experiment.layout == "contiguous" and ranks > 1):
        return plan
    others = _candidates(_task(experiment, "zigzag"), experiment, machine, passes)
    return replace(plan, balanced=next(iter(_ranked(others)), None))


def threshold(task: Task, machine: Machine, dtype: str, kind: str, direction: Pass) -> Threshold:
    """Return from which length on a ring hides its transfers over one kind of link. Local."""
    shape, rates, link = task.shape, machine.rates(dtype).of(direction), machine.links[kind]
    share = allowed_share(task.causal, task.keys, task.queries)
    keys_per_query = task.keys.seq_len / task.queries.seq_len

    def hidden(queries: int) -> bool:
        keys = queries * keys_per_query
        flops = share * attention_flops(shape, 1, direction) * queries * keys
        computing = flops / rates.at((queries * keys) ** 0.5)
        return computing >= link.seconds(hop_nbytes(shape, 1, direction) * keys)

    ratio = rates.last / link.bandwidth.last
    least = least_queries(shape, direction, rates.last, link.bandwidth.last, share=share)
    here = -(-task.queries.seq_len // task.size)
    return Threshold(kind, direction, ratio, least / ratio, least, _crossing(hidden), hidden(here))


def _crossing(hidden: Callable[[int], bool]) -> int | None:
    """Return the length from which on a hop is hidden; None if it is not at the longest.

    With measured rates there may be several such lengths; this is the last, up to those within an octave.
    """
    if not hidden(LONGEST):
        return None
    high = LONGEST
    while high > 1 and hidden(high // 2):
        high //= 2
    low = high // 2  # Not hidden, or 0.
    while high - low > 1:
        middle = (low + high) // 2
        if hidden(middle):
            high = middle
        else:
            low = middle
    return high


def _task(experiment: Experiment, layout: str) -> Task:
    ranks = experiment.ranks
    assert ranks is not None
    first = experiment.seq_len - experiment.num_queries
    return Task(
        experiment.shape,
        Layout(layout, experiment.seq_len, ranks),
        Layout(layout, experiment.num_queries, ranks, first),
        experiment.causal,
    )


def _candidates(
    task: Task, experiment: Experiment, machine: Machine, passes: tuple[Pass, ...]
) -> tuple[Candidate, ...]:
    return tuple(_candidate(method, task, experiment, machine, passes) for method in METHODS)


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those that fit, fastest first; of equally fast ones the simpler, which `METHODS` has first."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    fastest = min((candidate.seconds for candidate in fitting), default=0.0)
    equal = fastest * (1 + NOTHING)
    return sorted(fitting, key=lambda c: fastest if c.seconds <= equal else c.seconds)


def _candidate(
    method: str, task: Task, experiment: Experiment, machine: Machine, passes: tuple[Pass, ...]
) -> Candidate:
    option = GROUP_OPTIONS.get(method)
    given = getattr(experiment, option) if option else None
    try:
        inner = inner_ranks(
            method,
            task.size,
            given,
            lambda: [str(r // machine.ranks_per_node) for r in range(task.size)],
        )
        check_heads(method, inner, experiment.heads)
    except ConfigError as error:
        return Candidate(method, 1, {}, why_not=str(error))
    rates = machine.rates(experiment.dtype)
    found = {way: predict(task, method, inner, machine, rates.of(way), way) for way in passes}
    held = max(found[way].held_nbytes + _own_nbytes(task, way) for way in passes)
    return Candidate(method, inner, found, held, fits=held <= machine.memory)


def _own_nbytes(task: Task, direction: Pass) -> int:
    """Return the bytes of a rank's own tensors in a pass; rank 0 has the longest shards."""
    lens = {True: task.keys.shard_len(0), False: task.queries.shard_len(0)}
    shape = task.shape
    tensors = {
        name: (dims, dtype)
        for payload in OWN[direction]
        for name, dims, dtype in shape.tensors(
            Part(payload, 0), lens[payload in (Payload.KV, Payload.DKV)]
        )
    }
    return sum(prod(dims) * dtype.itemsize for dims, dtype in tensors.values())


def _product(dims: tuple[int, ...]) -> int:
    result = 1
    for size in dims:
        result *= size
    return result


def _by_pass(values: Mapping[Pass, int]) -> dict[str, int]:
    return {direction.value: value for direction, value in values.items()}


def _told(candidate: Candidate) -> dict[str, Any]:
    passes = {
        way.value: asdict(found) | {"waiting": found.waiting} for way, found in candidate.passes.items()
    }
    return {
        "method": candidate.method,
        "inner": candidate.inner,
        "seconds": candidate.seconds if candidate.passes else None,
        **passes,
        "held_nbytes": candidate.held_nbytes,
        "fits": candidate.fits,
        "why_not": candidate.why_not or None,
    }
