"""Verify a result file that exists: make its inputs again and compare its outputs with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ringmpi.config import Experiment
from ringmpi.errors import ConfigError, StoreError
from ringmpi.layout import Layout
from ringmpi.problem import FromFile, Problem, describe_input, problem_of, sha256_of, tensors_of
from ringmpi.store import OUTPUTS, ResultFile
from ringmpi.verify import Verdict, verify


def verify_file(path: str, how: str, progress: Callable[[int, int], None]) -> list[Verdict]:
    """Compare the outputs in a result file with the reference. Local.

    Parameters
    ----------
    path : str
    how : str
        ``full`` or ``sample:ROWS``.
    progress : callable
        Told how many of how many heads are done.

    Returns
    -------
    list of Verdict

    Raises
    ------
    StoreError
        If it is not a complete result file of a measured run, or its inputs are no longer to be had.
    ConfigError
        If `how` is neither of the two.
    """
    if how == "none":
        raise ConfigError("verify='none': use full or sample:ROWS")
    with ResultFile(path) as result:
        if result.kind != "measured":
            raise StoreError(f"{path}: is {result.kind}, so it has no outputs to verify")
        if not result.experiment.computes:
            raise StoreError(f"{path}: device=paced computes nothing, so it has no outputs to verify")
        experiment = replace(result.experiment, verify=how)
        result.check_values()  # Of the inputs too, which may be in the shards.
        result.check_outputs(OUTPUTS if experiment.backward else OUTPUTS[:2])
        problem = _problem(result, experiment)
        digests = result.facts("inputs")
        for name in tensors_of(experiment):
            recorded = digests.get(f"{name}_sha256")
            if recorded is not None and recorded != sha256_of(problem, name, experiment, _nothing):
                raise StoreError(f"{path}: {name} is not what it was when the run was made")
        layout = Layout(experiment.layout, experiment.seq_len, result.size)
        return verify(result, problem, experiment, layout, progress)


def _problem(result: ResultFile, experiment: Experiment) -> Problem:
    """Return where the inputs come from: the result file itself, if they were stored in it."""
    if result.has_inputs:
        return FromFile(experiment, str(result.path), "inputs")
    if experiment.input is not None:
        described = describe_input(experiment.input)
        for name, found in described.items():
            used = getattr(experiment, name)
            if name != "dtype" and found != used:
                raise StoreError(
                    f"{result.path}: {experiment.input} is not what it was when the run was made: it has "
                    f"{name}={found}, the run used {used}"
                )
    return problem_of(experiment)


def _nothing() -> None:
    """Let the digest of the inputs go on."""
