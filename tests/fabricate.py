"""Checkpoints and run directories through the project's own functions, without any training."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megakit.checkpoints.manifest import Manifest, checkpoint_name, list_files, write_manifest
from megakit.job.cluster import Cluster
from megakit.job.console import Console
from megakit.job.plan import begin, plan
from megakit.job.run import Run
from megakit.job.run_directory import RunDirectory, Stage
from model_pretrain import PretrainOptions

#: The checkpoint of a finished pretraining's last step, its best, with the default number of steps.
LAST = checkpoint_name(PretrainOptions.max_steps)
#: The settings of a model whose config has no fields, as NeMo writes them.
CONTEXT = {
    "root": {"key": "context"},
    "objects": {
        "context": {"items": [["Attr(name='model')", {"key": "module"}]]},
        "module": {"items": [["Attr(name='config')", {"key": "config"}]]},
        "config": {"items": []},
    },
}


class SavingTrainer(SimpleNamespace):
    """As much of Lightning's trainer as `CheckpointWriter` uses, without `save_checkpoint`."""

    def __init__(self, val_every: int, max_steps: int) -> None:
        super().__init__(
            global_step=0,
            max_steps=max_steps,
            val_check_interval=val_every,
            enable_validation=True,
            sanity_checking=False,
            should_stop=False,
            is_global_zero=True,
            global_rank=0,
            world_size=1,
            lightning_module=None,
            callback_metrics={},
            state=SimpleNamespace(fn="fit"),
            strategy=SimpleNamespace(barrier=lambda name: None),
            fit_loop=SimpleNamespace(epoch_loop=self),
        )

    def validation_is_due(self) -> bool:
        """As `StepLoop` decides it."""
        step = self.global_step
        is_due = step % self.val_check_interval == 0 or step == self.max_steps
        return bool((is_due or self.should_stop) and self.enable_validation)


def make_checkpoint(
    folder: Path,
    step: int,
    *,
    stage: str = "pretrain",
    model: str = "PretrainModel",
    dataset: str = "digits",
    val_loss: float | None = None,
    run: dict[str, Any] | None = None,
    context: dict[str, Any] = CONTEXT,
) -> Path:
    """A checkpoint as the writer leaves it, with a few bytes where the weights would be."""
    checkpoint = folder / checkpoint_name(step)
    (checkpoint / "weights").mkdir(parents=True)
    (checkpoint / "context").mkdir()
    (checkpoint / "weights" / "__0_0.distcp").write_bytes(b"weights of step %d" % step)
    (checkpoint / "weights" / ".metadata").write_text("where each weight is")
    (checkpoint / "weights" / "metadata.json").write_text("{}")
    (checkpoint / "context" / "io.json").write_text(json.dumps(context))
    manifest = Manifest(
        stage=stage,
        model=model,
        dataset=dataset,
        step=step,
        val_loss=val_loss,
        run=run or {},
        files=list_files(checkpoint),
    )
    write_manifest(checkpoint, manifest)
    return checkpoint


def prepare_run(stage: Stage, options: Any, script: Path | None = None) -> Run:
    """What a script does before its work begins, in this process; the directory is free after."""
    run = plan(stage, options, Cluster(), Console(silent=True), script)
    if not run.is_done:
        begin(run)
    run.close()
    return run


def make_run(
    stage: Stage,
    options: Any,
    steps: tuple[int, ...],
    done: bool = True,
    dataset: str = "digits",
    script: Path | None = None,
) -> RunDirectory:
    """A run directory with a checkpoint for each of the steps, the last of them the best.

    If the run is done, a checkpoint of its last step comes on top, which is the best then.
    """
    run = prepare_run(stage, options, script)
    directory = run.directory
    for step in (*steps, *([options.max_steps] if done else [])):
        make_checkpoint(
            directory.checkpoints,
            step,
            stage=stage.name,
            dataset=dataset,
            val_loss=1 / step,
            run=run.identity,
        )
    if done:
        (directory.path / "summary.json").write_text("{}")
    return directory
