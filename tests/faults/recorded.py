"""A training of six steps without a model, in a process of its own that can be killed anywhere.

Everything that touches the disk is the project's own: plan, lock, checkpoint writer, metrics.csv.
Only the model is replaced: its weights are a hash over all steps, so a run that goes on from the
wrong place cannot come out right by chance.
"""

import contextlib
import gc
import hashlib
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import megakit.checkpoints.store  # which each start would import anew  # noqa: F401
from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.console import Console
from megakit.job.options import TrainingOptions
from megakit.job.plan import begin, plan
from megakit.job.run_directory import Stage
from megakit.runtime.atomic_files import write_json
from megakit.training.metrics_csv import Metrics
from tests.fabricate import CONTEXT

STAGE = Stage("train")
KILLED, STOPPED, REFUSED = 137, 143, 2
HANGS_AFTER = 100  # seconds; a start takes 20 ms
#: What the interpreter reports before something changes on the disk.
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "fcntl.flock"}
WEIGHTS = Path("weights", "weights.txt")


@dataclass(kw_only=True)
class Options(TrainingOptions):
    max_steps: int = 6
    val_interval: int = 3
    save_interval: int = 2
    accelerator: Any = "cpu"

    def fingerprint(self) -> str:
        return "plums"


@dataclass(frozen=True)
class Start:
    """How one start ended, and what it said if it was refused or failed."""

    status: int
    message: str


def start(options: Options, *, kill_at: int | None = None, stop_after: int | None = None) -> Start:
    """Trains in a fork of this process, to the end or to the given fault.

    `kill_at` ends it before its n-th change on the disk; `stop_after` is the step of a stop.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(writing, options, kill_at, stop_after)
    os.close(writing)
    with os.fdopen(reading) as file:
        message = file.read()
    return Start(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), message)


def _run_child(writing: int, options: Options, kill_at: Any, stop_after: Any) -> NoReturn:
    gc.disable()  # what this process inherits may wait, when destroyed, for threads that it has not
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANGS_AFTER)
    status, message = 1, ""
    try:
        if kill_at is not None:
            _kill_at_change(kill_at)
        status = _train(options, stop_after)
    except UserError as error:
        status, message = REFUSED, str(error)
    except BaseException:
        message = traceback.format_exc()
    os.write(writing, message.encode())
    os._exit(status)


def _kill_at_change(count: int) -> None:
    left = count

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_write or event in CHANGES:
            left -= 1
            if left == 0:
                os._exit(KILLED)

    sys.addaudithook(watch)


def _train(options: Options, stop_after: int | None) -> int:
    run = plan(STAGE, options, Cluster(), Console(silent=True))
    if run.is_done:
        return 0
    begin(run)
    state, begun, resume = json.dumps(run.identity), 0, Path(run.resume) if run.resume else None
    if resume:
        state = (resume / WEIGHTS).read_text()
        begun = int(state.split()[0])

    def write(folder: Path) -> None:
        (folder / WEIGHTS).parent.mkdir()
        (folder / WEIGHTS).write_text(state)

    metrics, store = run.metrics_file(), run.store()
    assert metrics is not None
    store.open()
    for step in range(begun + 1, options.max_steps + 1):
        digest = hashlib.sha256(state.encode()).hexdigest()
        state = f"{step} {digest}"
        loss = int(digest[:6], 16) / 2**24
        validated: dict[str, Any] = {"val_loss": loss} if step % options.val_interval == 0 else {}
        metrics.append(Metrics(step, step, train_loss=loss, **validated))
        if step % options.save_interval == 0 or step == options.max_steps:
            store.save(step, write, validated, describe_model=_write_context, model="Hash")
        if step == stop_after:
            store.save(step, write, describe_model=_write_context, model="Hash")
            return STOPPED
    write_json(run.directory.summary, {"steps": options.max_steps})
    return 0


def _write_context(checkpoint: Path) -> None:
    (checkpoint / "context").mkdir()
    (checkpoint / "context" / "io.json").write_text(json.dumps(CONTEXT))


def find_whole(folder: Path) -> dict[str, Path]:
    """Every complete checkpoint below a folder, whatever its name, by weights and manifest."""
    found = {}
    for path in folder.rglob("manifest.json"):
        with contextlib.suppress(OSError):
            content = path.read_bytes() + (path.parent / WEIGHTS).read_bytes()
            found[hashlib.sha256(content).hexdigest()] = path.parent
    return found
