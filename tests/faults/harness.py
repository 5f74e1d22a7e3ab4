"""Real training runs that are stopped, killed and started again, and what must not differ after."""

import hashlib
import resource
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.left_behind import curves, list_checkpoints, lowest_loss, read_whole
from tests.scripts import REPOSITORY, Result, environment

MARK = "MEGAKIT_TEST_RUN"
HOOK = Path(__file__).with_name("hook")
#: Validates after steps 15, 30 and 40, saves after 10, 20, 30 and 40; an epoch of 1,297 samples
#: ends after every fifth step; two micro batches per step.
STEPS = (
    *("--max-steps", 40, "--global-batch-size", 256),
    *("--val-interval", 15, "--save-interval", 10),
)
ACCUMULATED = ("--micro-batch-size", 128)

#: The two chains, with NeMo and on Megatron-Core alone. Both have all the places below.
NEMO, MEGATRON = "model_pretrain.py", "examples/megatron/model_pretrain.py"
BEFORE_STEP = "megakit.training.stopping:StopSignals.received"
BETWEEN_WEIGHTS_AND_MANIFEST = "megakit.checkpoints.store:hash_weights"
AFTER_THE_LAST_SAVE = "megakit.job.finish:finish_training"
#: Where a run can be cut short, and at which call: of a start from step 10, after its first step.
PLACES = {
    BEFORE_STEP: 2,
    "megatron.core.optimizer.optimizer:ChainedOptimizer.step": 2,
    "megakit.data.sampler:GlobalBatchSampler.__iter__": 2,  # in a validation
    "megakit.training.metrics_csv:MetricsFile.append": 1,
    "megakit.checkpoints.store:CheckpointStore._write": 1,
    "megatron.core.dist_checkpointing.strategies.filesystem_async"
    ":FileSystemWriterAsync.write_preloaded_data": 1,
    BETWEEN_WEIGHTS_AND_MANIFEST: 1,
    "megakit.checkpoints.store:write_manifest": 1,
    "megakit.checkpoints.store:publish": 1,
    "megakit.checkpoints.store:CheckpointStore._prune": 1,
    "megakit.checkpoints.store:shutil.rmtree": 1,
    AFTER_THE_LAST_SAVE: 1,
}


@dataclass(frozen=True)
class Fault:
    """A signal at the n-th call of a function, counted from the start of the process, or in time.

    Attributes:
        place: `MODULE:FUNCTION`, or None.
        count: Which call.
        seconds: After the start, where there is no place.
        name: Of the signal.
        rank: Which process of the job gets it.
    """

    place: str | None = None
    count: int = 1
    seconds: float = 0.0
    name: str = "SIGKILL"
    rank: int = 0

    def __str__(self) -> str:
        if self.place is None:
            return f"{self.name} after {self.seconds} s"
        return f"{self.name} at call {self.count} of {self.place.rpartition(':')[2]}"


@dataclass
class Training:
    """A run of a script in a folder of its own, over all its starts.

    Attributes:
        folder: Its output directory.
        script: Which one.
        options: Of every start.
        python: Which one.
    """

    folder: Path
    script: str = NEMO
    options: tuple[object, ...] = ACCUMULATED
    python: object = sys.executable
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def path(self) -> Path:
        return self.folder / Path(self.script).stem.removeprefix("model_")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def fault_came(self) -> Path:
        """The file that a fault at a place makes when it comes."""
        return self.folder / ".fault-came"

    @property
    def common(self) -> tuple[object, ...]:
        """The options of every start."""
        data = ("--dataset", "digits", "--data-dir", self.folder / "no-data")
        return (*data, "--output-dir", self.folder, *STEPS, *self.options)

    def process(
        self, fault: Fault | None = None, *options: object, starter=(), before=None, **changes
    ) -> Any:
        """Starts the script, by torchrun if told so; the caller waits for it.

        `before` is called in the new process; `changes` are variables of its environment.
        """
        changes[MARK] = self.mark
        if fault is not None and fault.place is not None:
            moment = f"{fault.place}:{fault.count}"
            changes |= {"FAULT": f"{moment} {fault.name} {fault.rank}", "PYTHONPATH": str(HOOK)}
            changes["FAULT_CAME"] = str(self.fault_came)
            self.fault_came.unlink(missing_ok=True)
        arguments = (*self.common, *options)
        return subprocess.Popen(
            [*map(str, (self.python, *starter, REPOSITORY / self.script, *arguments))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**changes),
            start_new_session=True,
            preexec_fn=before,
        )

    def start(self, fault: Fault | None = None, *options: object, largest_file=None) -> Result:
        """Starts the script, lets the fault come, and waits for the end of all its processes.

        A fault at a place has to come.
        """

        def limit() -> None:
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        process = self.process(fault, *options, before=limit)
        if fault is not None and fault.place is None:
            try:
                process.wait(fault.seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(getattr(signal, fault.name))
        out, err = process.communicate(timeout=600)
        assert leftover_processes(self.mark) == [], f"left behind after {fault}"
        if fault is not None and fault.place is not None:
            assert self.fault_came.exists(), f"no {fault}: status {process.returncode}\n{err}"
        return Result(process.returncode, out, err)

    def start_without_reader(self) -> int:
        """Starts the script with nobody at the other end of its pipes; returns its exit status."""
        process = self.process()
        process.stdout.close()
        process.stderr.close()
        status: int = process.wait(timeout=600)
        assert leftover_processes(self.mark) == []
        return status

    def wait_for_steps(self, process: Any) -> None:
        """Returns once the run has written its first row of metrics."""
        deadline = time.monotonic() + 120
        metrics = self.path / "metrics.csv"
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            assert process.poll() is None, process.communicate(timeout=10)
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def result(self) -> dict[str, Any]:
        """Everything that a stop must not change."""
        checkpoints = list_checkpoints(self.checkpoints)
        assert [path for path in self.checkpoints.iterdir() if path not in checkpoints] == []
        best = lowest_loss(checkpoints)
        return {
            "checkpoints": {path.name: _content(path) for path in checkpoints},
            "best": best.name if best else None,
            "metrics.csv": (self.path / "metrics.csv").read_text(),
            "curves": curves(self.path / "tensorboard"),
        }


def _content(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's weights and optimizer states, byte by byte, and its validation loss."""
    manifest = read_whole(checkpoint)
    shards = sorted((checkpoint / "weights").glob("*.distcp"))
    assert shards
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}
    return {"val_loss": manifest["val_loss"], **digests}


def leftover_processes(mark: str, patience: float = 10.0) -> list[str]:
    """Command lines of processes that a run has started and that do not end by themselves."""
    deadline = time.monotonic() + patience
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _marked(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(f"{folder.name} {command}")
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
    return found
