"""A stage's run inside a process that goes on afterwards: in a notebook, or at a prompt."""

import contextlib
import importlib
import time
import warnings
from collections.abc import Iterator

from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.options import CommonOptions
from megakit.job.plan import prepare
from megakit.job.script import Run
from megakit.job.stage import Stage
from megakit.reporting.console import Console
from megakit.reporting.streams import diverted
from megakit.runtime.accelerator import find_accelerator, use_accelerator
from megakit.runtime.teardown import destroy_parallel_state
from megakit.runtime.threads import limit_threads


def import_stack(width: int) -> None:
    """Imports NeMo and Megatron-Core without a word, and has them run on this machine's device.

    To be called before anything else imports them, or torch.

    Args:
        width: Of the layers to come: narrow ones compute in one thread.
    """
    limit_threads(width)
    with diverted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages about each other; none is for the reader
        use_accelerator(find_accelerator().name)
        importlib.import_module("megakit.training.stages")
    # What they hold against each other's versions is not for the reader, in later cells either.
    warnings.filterwarnings("ignore", module=r"(megatron|nemo|lightning|torch)\b")


@contextlib.contextmanager
def open_run(stage: Stage, options: CommonOptions) -> Iterator[Run]:
    """Checks and opens a stage's run as its script does, and closes it at the end of the block.

    Inside, what frameworks print goes to the run's log.txt. A run that was stopped, by a notebook's
    stop button, say, goes on when it is opened again with the same options. Megatron's parallel
    state stays as the block leaves it, to look at, until the next one is opened.

    Args:
        stage: What is run, as its script names it.
        options: The script's options.

    Raises:
        UserError: The options are impossible, the data is missing, the run is in use, or it needs
            several processes.
    """
    began = time.perf_counter()
    console = Console(silent=True)
    plan, guard = prepare(stage, options, Cluster(), console)
    with guard:
        if plan.layout.world_size > 1:
            raise UserError(
                f"--devices {plan.layout.devices}: this is a single process. "
                f"Start {stage.script}, which starts as many as it needs."
            )
        run = Run(stage, options, plan, console, is_main=True, began=began)
        with diverted(run.directory.log):
            use_accelerator(plan.accelerator.name)
            destroy_parallel_state()
            yield run
