"""The command line: each command is one call.

Nothing is imported before thread counts are set, and MPI is initialised only by `run`, after all
parameters are checked; so ``--help`` works on a login node.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ringmpi.comm.launcher import launch_from_environment
from ringmpi.comm.threads import limit_blas_threads
from ringmpi.errors import BROKEN, FAILED_VERIFICATION, OK, ConfigError, RingMPIError

if TYPE_CHECKING:
    from ringmpi.comm.job import Job
    from ringmpi.config import Experiment


#: Options of `run` that mean something else to `sweep`, which sets them for each of its runs.
SWEPT = ("ranks", "output")

#: Options of `simulate` that say how ranks compute unevenly.
DISTURBANCES = (
    ("noise", "X", "standard deviation of a step's compute, as a share of it [the machine's]"),
    ("slow", "RANK:FACTOR,..", "ranks that take FACTOR times as long to compute"),
    ("stragglers", "N:FACTOR", "N ranks, chosen by --seed, that do"),
    ("delay", "RANK:STEP:SECONDS,..", "single steps that compute so much longer"),
)


class _Parser(argparse.ArgumentParser):
    """Raises on a bad command line, so that it is told like every other bad parameter."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    limit_blas_threads()
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.command(arguments)
    except RingMPIError as error:
        from ringmpi.comm.job import refuse

        return refuse(launch_from_environment(), error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:
        # Not left to Python, whose exit code 1 would mean a failed verification.
        traceback.print_exc()
        return BROKEN
    return code


def _parser() -> argparse.ArgumentParser:
    import ringmpi

    parser = _Parser(
        prog="ringmpi",
        description="Exact ring attention over MPI, with every stall measured.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ringmpi {ringmpi.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for name, help_text, add_options, command in (
        ("run", "one experiment, under mpirun or srun; writes one HDF5 file", _run_options, _run),
        ("verify", "a result file against the reference; the exit code says", _verify_options, _verify),
        (
            "sweep",
            "rank counts x parameters; starts the launcher itself; resumes",
            _sweep_options,
            _sweep,
        ),
        (
            "report",
            "tables of result files; --plot, --html and --perfetto show them",
            _report_options,
            _report,
        ),
        (
            "plan",
            "overlap, memory, FLOPs and times of the methods on a machine, without running",
            _plan_options,
            _plan,
        ),
        (
            "calibrate",
            "under mpirun or srun: FLOP/s, links and noise of this machine, as a file for plan and simulate",
            _calibrate_options,
            _calibrate,
        ),
        (
            "simulate",
            "an experiment on a machine that is not here; writes a result file like that of a run",
            _simulate_options,
            _simulate,
        ),
        ("doctor", "what this machine offers", _doctor_options, _doctor),
    ):
        sub = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        add_options(sub)
        sub.set_defaults(command=command)
    return parser


def _add_experiment_options(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """Add every field of `Experiment` as an option; absent ones stay out of the namespace."""
    from ringmpi.config import options

    parser.add_argument("--config", metavar="FILE", help="TOML file with options by name")
    for name, declared in options().items():
        if name in leave_out:
            continue
        flag, told = "--" + name.replace("_", "-"), declared.metadata
        default = declared.default
        derived = "[" in told["help"] or name == "seq_len" or default is None or default is False
        shown = "" if derived else f" [{default}]"
        if told["kind"] is bool:
            parser.add_argument(
                flag, action="store_true", default=argparse.SUPPRESS, help=told["help"] + shown
            )
        else:
            help_text = told["help"] + shown
            if told["choices"]:
                help_text += ": " + ", ".join(told["choices"])
            parser.add_argument(
                flag,
                dest=name,
                default=argparse.SUPPRESS,
                metavar=told["metavar"] or "NAME",
                help=help_text.replace("%", "%%"),
            )


def _given(arguments: argparse.Namespace, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the options that were given, the command line before the file."""
    from ringmpi.config import options, parse, read_toml

    given = read_toml(arguments.config) if arguments.config else {}
    for name in leave_out:
        given.pop(name, None)
    for name in options():
        if hasattr(arguments, name) and name not in leave_out:
            value = getattr(arguments, name)
            given[name] = parse(name, value) if isinstance(value, str) else value
    return given


def _experiment(given: dict[str, Any]) -> Experiment:
    from ringmpi.config import experiment_from
    from ringmpi.problem import describe_input

    if not given.get("input"):
        return experiment_from(given)
    # The result file must find its input again from another folder.
    given["input"] = str(Path(given["input"]).absolute())
    return experiment_from(given, describe_input(given["input"]))


def _run_options(parser: argparse.ArgumentParser) -> None:
    _add_experiment_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    def prepared() -> tuple[Experiment, Callable[[Job], int]]:
        experiment = _experiment(_given(arguments))

        def work(job: Job) -> int:
            from ringmpi.experiment import run

            return run(experiment, job)

        return experiment, work

    return _as_job(prepared)


def _as_job(prepared: Callable[[], tuple[Experiment, Callable[[Job], int]]]) -> int:
    """Do something as one rank of an MPI job, and return the exit code.

    `prepared` is called before MPI is initialised. It returns an experiment that says what computes and what
    the time limit is, and what is done with the job.
    """
    from ringmpi.comm.signals import Signals

    signals = Signals()
    signals.heed()  # From the first moment on: loading what follows takes a while.

    # h5py starts a process as it loads, and none may be started once MPI is initialised.
    import ringmpi.store  # noqa: F401
    from ringmpi.comm.job import run_job

    experiment, work = prepared()
    if experiment.device in ("auto", "native"):
        from ringmpi.devices import prepare

        # Now, as it starts a compiler. What comes of it the ranks tell each other once they can.
        prepare(stopped=lambda: signals.received is not None)
    return run_job(launch_from_environment(), experiment.timeout, signals, work)


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a result of ringmpi run")
    parser.add_argument("--verify", default="full", metavar="HOW", help="full or sample:ROWS [full]")


def _verify(arguments: argparse.Namespace) -> int:
    from ringmpi.recheck import verify_file
    from ringmpi.report.progress import track
    from ringmpi.report.tables import verdict_table
    from ringmpi.report.text import make_console

    console = make_console()
    with track("verify", console) as progress:
        verdicts = verify_file(arguments.file, arguments.verify, progress)
    verdict_table(verdicts, arguments.verify, console)
    return OK if all(verdict.passed for verdict in verdicts) else FAILED_VERIFICATION


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="results of ringmpi run")
    parser.add_argument(
        "--plot",
        nargs="?",
        const="",
        metavar="PICTURE",
        help="one picture of all files, .png, .svg or .pdf [a picture beside each file]",
    )
    parser.add_argument(
        "--figure",
        default="timeline",
        metavar="NAME",
        help="what --plot draws: timeline, stall (against block length), scaling or methods [timeline]",
    )
    parser.add_argument(
        "--html",
        nargs="?",
        const="",
        metavar="PAGE",
        help="one page of all files to look around in, without network [a page beside each file]",
    )
    parser.add_argument(
        "--perfetto",
        nargs="?",
        const="",
        metavar="TRACE",
        help="one trace of all files, .json for ui.perfetto.dev [a trace beside each file]",
    )
    parser.add_argument(
        "--compare", action="store_true", help="one table of all files: methods side by side"
    )
    parser.add_argument("--csv", metavar="CSV", help="write that table here too, with more columns")


def _report(arguments: argparse.Namespace) -> int:
    from ringmpi.report.show import Asked, report_files

    told = {name: value for name, value in vars(arguments).items() if name not in ("files", "command")}
    report_files(arguments.files, Asked(**told))
    return OK


def _sweep_options(parser: argparse.ArgumentParser) -> None:
    _add_experiment_options(parser, leave_out=SWEPT)
    parser.add_argument(
        "--ranks", required=True, metavar="P,P,..", help="rank counts, such as 1,2,3,4,5,8"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="OPTION=VALUE,VALUE,..",
        help="also vary an option of run; may be given more than once",
    )
    parser.add_argument(
        "--output", default="results/sweep", metavar="DIR", help="where the files go [results/sweep]"
    )
    parser.add_argument(
        "--launcher",
        default="auto",
        metavar="NAME",
        help="auto, mpiexec, srun or a path; options for it may follow, as in 'srun --mpi=pmi2' [auto]",
    )
    parser.add_argument(
        "--tokens-per-rank",
        type=int,
        metavar="N",
        help="weak scaling: instead of --seq-len, N tokens for each rank",
    )
    parser.add_argument(
        "--share",
        metavar="I/N",
        help="run only the I-th of N shares of the points; array: the share of a task of a Slurm job array",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")


def _sweep(arguments: argparse.Namespace) -> int:
    from ringmpi.sweep import Sweep

    given = _given(arguments, leave_out=SWEPT)
    sweep = Sweep(
        given,
        arguments.ranks,
        arguments.vary,
        arguments.output,
        arguments.launcher,
        arguments.tokens_per_rank,
        arguments.share,
    )
    return sweep.show_commands() if arguments.dry_run else sweep.run()


def _plan_options(parser: argparse.ArgumentParser) -> None:
    from ringmpi.config import options
    from ringmpi.model.plan import PLANNED
    from ringmpi.model.transformer import TRANSFORMERS

    parser.add_argument(
        "--machine", metavar="NAME|FILE", help="a built-in machine, or a file NAME.toml"
    )
    parser.add_argument("--list", action="store_true", help="only list the built-in machines")
    parser.add_argument(
        "--show-machine",
        action="store_true",
        help="only print the machine's file, to begin one's own with",
    )
    parser.add_argument(
        "--paper", action="store_true", help="only compare the Ring Attention paper's tables with ours"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: seconds, bytes, FLOPs, tokens")
    parser.add_argument(
        "--model", metavar="NAME", help="shape of a whole transformer: " + ", ".join(TRANSFORMERS)
    )
    parser.add_argument("--layers", type=int, metavar="L", help="of a plain transformer [1]")
    parser.add_argument("--hidden", type=int, metavar="H", help="its hidden size [heads * head_dim]")
    _add_experiment_options(parser, leave_out=[name for name in options() if name not in PLANNED])


def _plan(arguments: argparse.Namespace) -> int:
    from ringmpi.report.plan import show_machine, show_machines, show_paper, show_plan

    if arguments.list:
        show_machines()
    elif arguments.paper:
        show_paper(arguments.json)
    elif arguments.machine is None:
        raise ConfigError("give --machine NAME or FILE.toml; --list names the built-in ones")
    elif arguments.show_machine:
        show_machine(arguments.machine)
    else:
        from ringmpi.model.plan import plan_from

        plan = plan_from(
            _given(arguments), arguments.machine, arguments.model, arguments.layers, arguments.hidden
        )
        show_plan(plan, arguments.json)
    return OK


#: Options of `run` that say what computes and over which links.
CALIBRATED = (
    *("batch", "heads", "kv_heads", "head_dim", "device", "threads", "matrix_unit"),
    *("weights", "flops", "slow"),
    *("link", "link_map", "chunk_limit", "timeout", "seed"),
)


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    from ringmpi.config import options
    from ringmpi.model.calibration import LENGTHS, SECONDS

    parser.add_argument(
        "--dtype",
        default="float32",
        metavar="D,D,..",
        help="of q, k and v, such as float32,bfloat16 [float32]",
    )
    lengths = ",".join(map(str, LENGTHS))
    parser.add_argument(
        "--lengths", default=lengths, metavar="N,N,..", help=f"tokens of the blocks [{lengths}]"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="T",
        help=f"for the compute of all of them, leaving out long ones; links take as long [{SECONDS:g}]",
    )
    parser.add_argument("--output", metavar="FILE", help="machine file [results/machine-<host>.toml]")
    _add_experiment_options(parser, leave_out=[name for name in options() if name not in CALIBRATED])


def _calibrate(arguments: argparse.Namespace) -> int:
    def prepared() -> tuple[Experiment, Callable[[Job], int]]:
        from math import inf
        from socket import gethostname

        from ringmpi.calibrate import calibrate
        from ringmpi.config import experiment_from
        from ringmpi.model.calibration import parse_lengths

        lengths, seconds = parse_lengths(arguments.lengths), arguments.seconds
        if not 0 < seconds < inf:
            raise ConfigError(f"seconds={seconds}: must be a positive number of seconds, such as 20")
        given = {**_given(arguments, leave_out=("dtype", "output")), "seq_len": lengths[-1]}
        dtypes = dict.fromkeys(arguments.dtype.split(","))
        experiments = [experiment_from({**given, "dtype": dtype}) for dtype in dtypes]
        path = Path(arguments.output or f"results/machine-{gethostname()}.toml")
        return experiments[0], lambda job: calibrate(experiments, lengths, seconds, path, job)

    return _as_job(prepared)


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    from ringmpi.config import options
    from ringmpi.simulator import SIMULATED

    parser.add_argument(
        "--machine", metavar="NAME|FILE", required=True, help="a built-in machine, or a file NAME.toml"
    )
    for name, metavar, told in DISTURBANCES:
        parser.add_argument(
            f"--{name}", metavar=metavar, default=argparse.SUPPRESS, help=told.replace("%", "%%")
        )
    _add_experiment_options(parser, leave_out=[name for name in options() if name not in SIMULATED])


def _simulate(arguments: argparse.Namespace) -> int:
    from functools import partial

    from ringmpi.report.progress import track
    from ringmpi.report.tables import report
    from ringmpi.report.text import make_console
    from ringmpi.simulation import scenario_from, simulate
    from ringmpi.store import ResultFile

    asked = {name: getattr(arguments, name) for name, _, _ in DISTURBANCES if hasattr(arguments, name)}
    given = _given(arguments, leave_out=[name for name, _, _ in DISTURBANCES])
    scenario = scenario_from(given, arguments.machine, asked)
    console = make_console()
    with ResultFile(simulate(scenario, partial(track, console=console))) as result:
        report(result, console)
    return OK


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    del parser  # It takes none.


def _doctor(arguments: argparse.Namespace) -> int:
    del arguments
    from ringmpi.doctor import examine

    examine()
    return OK


if __name__ == "__main__":
    sys.exit(main())
