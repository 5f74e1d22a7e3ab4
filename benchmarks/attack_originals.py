"""The runs whose checkpoints are attacked, and the three ways to use a checkpoint."""

import contextlib
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import attack_runs
from attack_runs import End
from attack_victim import Victim
from attack_watch import Sandbox

from megakit.checkpoints.manifest import list_checkpoints, step_of

COMMON = ("--dataset", "digits", "--accelerator", "cpu")
TRAINING = ("--limit-val-batches", "1")
#: Steps of pretraining; of the stopped run, checkpoints of both intervals remain.
STEPS, INTERVAL, STOP = 6, 2, 4


@dataclass(frozen=True)
class Use:
    """One way to use a checkpoint.

    Attributes:
        script: Which script uses it.
        options: The script's, besides its folders.
        result: The file to compare, below the output directory.
    """

    script: str
    options: tuple[str, ...]
    result: str


PRETRAIN = (
    *(*TRAINING, "--max-steps", str(STEPS)),
    *("--val-interval", str(INTERVAL), "--save-interval", str(INTERVAL)),
)
USES = {
    "resume": Use("model_pretrain.py", PRETRAIN, "pretrain/metrics.csv"),
    "finetune": Use("model_finetune.py", (*TRAINING, "--max-steps", "3"), "finetune/metrics.csv"),
    "predict": Use("model_predict.py", (), "predict/predictions.csv"),
}


@dataclass(frozen=True)
class Originals:
    """The runs whose checkpoints are attacked.

    Attributes:
        whole: All three stages; nothing happened to them.
        stopped: Pretraining, stopped half-way.
        no_data: An empty folder, for `--data-dir`.
    """

    whole: Sandbox
    stopped: Sandbox
    no_data: Path

    @classmethod
    def make(cls, folder: Path) -> "Originals":
        """Runs the three scripts, and pretraining once more, stopped after a checkpoint."""
        made = cls(Sandbox(folder / "whole"), Sandbox(folder / "stopped"), folder / "no-data")
        for sandbox in (made.whole, made.stopped):
            sandbox.out.mkdir(parents=True)
        for use in USES.values():
            end = _run_alone(use, made.whole, made.no_data)
            if found := attack_runs.problems(end, use.script, lambda: None) or end.status:
                sys.exit(f"{use.script} fails without an attack: {found}\n{end.err[-2000:]}")
        with _stopping_before(STOP):
            _run_alone(USES["resume"], made.stopped, made.no_data)
        assert [one.name for one in list_checkpoints(made.checkpoints("stopped", "pretrain"))] == [
            f"step={step:06d}" for step in (STOP - INTERVAL, STOP)
        ]
        return made

    def checkpoints(self, which: str, stage: str) -> Path:
        """The folder of a stage's checkpoints."""
        sandbox: Sandbox = getattr(self, which)
        return sandbox.out / stage / "checkpoints"

    def prepare(self, use: str, sandbox: Sandbox, dice: random.Random) -> Victim:
        """Makes a folder for one attack, with the checkpoint in it and what that may need."""
        sandbox.folder.mkdir(parents=True)
        own, other = ("pretrain", "finetune")[:: -1 if use == "predict" else 1]
        if use == "resume":
            shutil.copytree(self.stopped.out, sandbox.out)
            checkpoint = list_checkpoints(sandbox.out / "pretrain" / "checkpoints")[-1]
        else:
            original = list_checkpoints(self.checkpoints("whole", own))[-1]
            checkpoint = sandbox.folder / original.name
            shutil.copytree(original, checkpoint)
            sandbox.out.mkdir()
        sandbox.canary.write_bytes(b"\x80\x04N.")
        sibling = list_checkpoints(self.checkpoints("stopped", "pretrain"))[0]
        return Victim(
            folder=checkpoint,
            trace=sandbox.trace,
            canary=sandbox.canary,
            other=list_checkpoints(self.checkpoints("whole", other))[-1],
            sibling=sibling,
            dice=dice,
        )


def _run_alone(use: Use, sandbox: Sandbox, no_data: Path) -> End:
    process, began = attack_runs.start(*command(use, sandbox, no_data)), time.monotonic()
    while (end := attack_runs.finish(process, began, sandbox)) is None:
        time.sleep(0.02)
    return end


def command(
    use: Use, sandbox: Sandbox, no_data: Path, *options: str
) -> tuple[str, list[str], Sandbox]:
    folders = ("--output-dir", str(sandbox.out), "--data-dir", str(no_data))
    return use.script, [*COMMON, *use.options, *folders, *options], sandbox


@contextlib.contextmanager
def _stopping_before(step: int) -> Iterator[None]:
    """Ends the scripts forked within as a kill does, once the checkpoint of a step is complete."""
    from megakit.checkpoints.writer import CheckpointWriter

    prune = CheckpointWriter._prune

    def end(self: CheckpointWriter, last: Path) -> None:
        if step_of(last) == step:
            os._exit(9)
        if step_of(last) > INTERVAL:
            prune(self, last)

    CheckpointWriter._prune = end  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointWriter._prune = prune  # type: ignore[method-assign]
