"""Prints which rank of a cluster would store what; the cluster is not needed.

    ./run layout [pretrain | finetune | SCRIPT.py] [the script's options]
    python -m tools.layout SCRIPT.py [the script's options]

The script is a training script, by default model_pretrain.py. It does not
train: its model is built on fake ranks, on torch's meta device. The options are
the script's own, such as --tensor-parallel 4 --devices 8 --num-nodes 16. Options
that change neither the model nor the layout have no effect. --precision auto is
bf16-mixed; --checkpoint is refused. Exit status: 0 success; 2 wrong options, or
no training script. `./run trace` shows what ranks communicate.
"""

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from megakit.errors import UserError
from megakit.job import Run, script as scripts
from megakit.job.cluster import Cluster
from megakit.job.command_line import parse_options, program
from megakit.job.console import Console
from megakit.job.layout import Layout, find_sizes, plan_layout
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.run_directory import Stage
from megakit.runtime.accelerator import find_accelerator, use_accelerator
from megakit.runtime.deferred_imports import resume_collector, suspend_collector

from .shares_table import description


class _Built(BaseException):
    """Ends a script's work where training would begin; its arguments are those of `train`."""


class _Run(Run[Any]):
    """A run that writes no files."""

    def callbacks(self) -> list[Any]:
        """Returns no callbacks."""
        return []

    def logger(self) -> Any:
        """Returns no logger."""
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    scripts.begin_script()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if given else 2
    script = Path(given[0])
    if not script.is_file():
        print(
            f"layout: {script}: there is no such script. Name a training script.", file=sys.stderr
        )
        return 2
    if {"-h", "--help"} & {*given}:
        print(__doc__)
    sys.argv = given  # as the script's own command line
    sys.path.insert(0, str(script.resolve().parent))
    with mock.patch.object(scripts, "run_script", _describe):
        runpy.run_path(str(script), run_name="__main__")
    print(f"layout: {script}: does not call run_script. Name a training script.", file=sys.stderr)
    return 2


def _describe(
    stage: Stage, options_class: type[CommonOptions], work: Callable[..., Path]
) -> NoReturn:
    """Replaces `run_script`: prints the shares of the script's job instead of training."""
    options = parse_options(options_class)
    status = 0
    try:
        print(describe(stage, options, work), flush=True)
    except UserError as error:
        for problem in error.problems:
            print(f"{program()}: {problem}", file=sys.stderr)
        status = 2
    os._exit(status)  # a normal exit waits for the frameworks


def describe(stage: Stage, options: CommonOptions, work: Callable[..., Path]) -> str:
    """Returns the tables of a script's job.

    Args:
        stage: The script's stage in the chain.
        options: Options of the command line.
        work: The script's work. It is called once for each rank to build, until it trains.

    Raises:
        UserError: Options are wrong, or the data cannot be used; all problems are listed.
    """
    layout, dataset = _check(options)
    precision = "bf16-mixed" if options.precision == "auto" else options.precision
    run = _Run(
        stage=stage,
        options=options,
        layout=layout,
        accelerator=find_accelerator("cpu"),
        precision=precision,
        dataset=dataset,
        console=Console(silent=True),
        identity={"best_by": "last"},
    )
    suspend_collector()
    # Hides the frameworks' messages.
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        use_accelerator("cpu")
        from .shares import compute_shares

        resume_collector()

        with _capturing():
            module, *_ = _build(work, run)
            shares = compute_shares(partial(_build, work, run), layout)
    return "\n".join(description(module.config.model_cls.__name__, layout, precision, shares))


def _check(options: CommonOptions) -> tuple[Layout, str]:
    """Checks the options as a start of the script does; returns the layout and the dataset."""
    if not isinstance(options, TrainingOptions):
        raise UserError("the script does not train. Name a training script.")
    problems = options.problems()
    checkpoint = getattr(options, "checkpoint", None)
    if checkpoint not in (None, "none"):
        problems.append(
            f"--checkpoint {checkpoint}: is not read here. Leave the option out, and "
            "give the model's sizes as options."
        )
    # As if the job had been started: this machine may have other devices than the cluster.
    cluster = Cluster("torchrun", devices=options.devices or 1, num_nodes=options.num_nodes or 1)
    layout, found = plan_layout(options, cluster, find_sizes(options, {}))
    if problems := problems + found:
        raise UserError(problems)
    return layout, options.fingerprint()


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """Makes the function that trains raise `_Built`."""
    from megakit.nemo import fit

    def capture(*, model: Any, data: Any, trainer: Any, **_: Any) -> NoReturn:
        raise _Built(model, data, trainer)

    with mock.patch.object(fit, "train", capture):  # megakit.training looks it up here
        yield


def _build(work: Callable[..., Path], run: Run[Any]) -> tuple[Any, ...]:
    """Returns the Lightning module, the data module and the trainer of a script."""
    try:
        work(run)
    except _Built as built:
        return built.args
    raise UserError(
        f"{Path(sys.argv[0]).name}: its work does not call train of megakit.training. Call it."
    )


if __name__ == "__main__":
    sys.exit(main())
