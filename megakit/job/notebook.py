"""Runs a stage inside a process that continues afterwards: a notebook or a Python prompt."""

import contextlib
import importlib
import time
import warnings
from collections.abc import Iterator

from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.console import Console, diverted
from megakit.job.options import CommonOptions
from megakit.job.plan import begin, plan
from megakit.job.run import Run
from megakit.job.run_directory import Stage
from megakit.runtime.accelerator import (
    destroy_parallel_state,
    find_accelerator,
    limit_threads,
    use_accelerator,
    use_full_float32,
)
from megakit.runtime.signals import handlers_restored


def import_stack(width: int, tokens: int = 1024) -> None:
    """Imports NeMo and Megatron-Core silently, and makes them run on this machine's device.

    Call it before anything imports NeMo, Megatron-Core or torch.

    Args:
        width: Width of the model's layers; narrow layers compute in one thread.
        tokens: Tokens of a micro batch; samples, for a model without tokens.
    """
    limit_threads(tokens * width**2)
    with diverted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # packages warn about each other, not about user code
        use_accelerator(find_accelerator().name)
        importlib.import_module("megakit.nemo.fit")
    # The packages also warn about each other's versions in later notebook cells.
    warnings.filterwarnings("ignore", module=r"(megatron|nemo|lightning|torch)\b")


@contextlib.contextmanager
def open_run(stage: Stage, options: CommonOptions) -> Iterator[Run]:
    """Checks and opens a stage's run as its script does, and closes it at the end of the block.

    Inside the block, the frameworks' output goes to the run's log.txt. A run that was stopped, for
    example by a notebook's stop button, resumes when it is opened again with the same options.
    Megatron's parallel state remains after the block, for inspection, until the next `open_run`.

    Raises:
        UserError: The options are invalid, the data is missing, the run is in use, or the run
            needs several processes.
    """
    began = time.perf_counter()
    console = Console(silent=True)
    if (options.devices or 1) > 1:
        raise UserError(
            f"--devices {options.devices}: open_run uses a single process. Run {stage.script}, "
            "which starts all processes."
        )
    run = plan(stage, options, Cluster(), console)
    run.began = began
    with contextlib.closing(run), contextlib.ExitStack() as block:
        if not run.is_done:
            begin(run)
        block.enter_context(diverted(run.directory.log))
        block.enter_context(handlers_restored())
        use_accelerator(run.accelerator.name)
        if run.precision == "32":
            use_full_float32()
        destroy_parallel_state()
        yield run
