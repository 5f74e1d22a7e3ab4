"""What the pool's ranks run on `masked_text`: validations, trainings and predictions."""

import importlib
import sys
from pathlib import Path
from typing import Any

from megakit.job.layout import Layout
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.run import Run
from megakit.job.runs import Stage

FOLDER = str(Path(__file__).parent)
GLOBAL_BATCH = 6
#: Processes, tensor-parallel ranks, pipeline stages and micro batch size.
LAYOUTS: dict[str, tuple[int, int, int, int]] = {
    "one process": (1, 1, 1, 3),
    "other micro batches": (1, 1, 1, 2),
    "one micro batch": (1, 1, 1, 6),
    "dp2": (2, 1, 1, 3),
    "tp2": (2, 2, 1, 3),
    "pp2": (2, 1, 2, 3),
    "pp2-dp2": (4, 1, 2, 1),
}


def layout(name: str) -> Layout:
    world_size, tensor, pipeline, micro = LAYOUTS[name]
    return Layout(world_size, 1, tensor, pipeline, GLOBAL_BATCH, micro)


def make_run(folder: Path, sizes: Layout, **training: Any) -> Run[Any]:
    """A run of a stage, which trains if there are options of a training."""
    kind = TrainingOptions if training else CommonOptions
    options = kind(output_dir=folder, precision="32", **training)
    stage = Stage("stage")
    run: Run[Any] = import_here("jobs").make_run(stage, options, sizes, dataset="tokens")
    return run


def import_here(name: str) -> Any:
    """A file of this folder; a rank does not know the package `tests`."""
    sys.path.insert(0, FOLDER)
    return importlib.import_module(name)


def exact(num_blocks: int | None = None) -> tuple[float, Any]:
    """The loss of some blocks, and the logits of all, of the initial weights in plain torch."""
    from megakit.testing import distributed_model_parallel_state

    masked_text = import_here("masked_text")
    with distributed_model_parallel_state(accelerator="cpu"):
        module = masked_text.make_module()
        module.configure_model()
        model = module.module.eval()
        loss = masked_text.exact_loss(model, num_blocks or masked_text.NUM_BLOCKS)
        return loss, masked_text.exact_logits(model)


def validate(
    sizes: Layout,
    folder: Path,
    loss: str = "values",
    num_batches: int | None = None,
    of_nemo: bool = False,
) -> dict[str, float]:
    """The values that `trainer.validate` logs for the initial weights.

    `of_nemo` uses the strategy of NeMo.
    """
    from nemo import lightning as nl

    from examples.gpt.gpt_components import build_trainer

    masked_text = import_here("masked_text")
    trainer = build_trainer(make_run(folder, sizes))
    if of_nemo:
        trainer = nl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=nl.MegatronStrategy(),
            plugins=nl.MegatronMixedPrecision(precision="32"),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
    if num_batches is not None:
        trainer.limit_val_batches = num_batches
    trainer.validate(masked_text.make_module(loss), masked_text.make_data(sizes), verbose=False)
    assert not any(value.isnan() for value in trainer.callback_metrics.values())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def train(sizes: Layout, folder: Path) -> dict[str, float]:
    """Trains for some steps; the logged values of the last weights, and without stages the exact
    loss.
    """
    from torchmetrics import MeanMetric

    from examples.gpt.gpt_components import build_trainer
    from megakit.training import ValidationMetric, train

    def real_losses(batch: Any, losses: Any) -> Any:
        return losses, batch["loss_mask"] > 0

    masked_text = import_here("masked_text")
    module = masked_text.make_module()
    metric = ValidationMetric(MeanMetric(), real_losses, higher_is_better=False)
    module.validation_metrics = lambda: {"mean": metric}
    sizes_of_run = {"max_steps": 4, "val_interval": 2, "save_interval": 2, "best_by": "val_bits"}
    run = make_run(folder, sizes, global_batch_size=GLOBAL_BATCH, **sizes_of_run)
    trainer = build_trainer(run)
    train(model=module, data=masked_text.make_data(sizes), trainer=trainer)
    values = trainer.callback_metrics.items()
    logged = {name: float(value) for name, value in values if name.startswith("val_")}
    if sizes.pipeline > 1:
        return logged
    return {**logged, "exact": masked_text.exact_loss(module.module.eval())}


def predict(sizes: Layout, folder: Path, sequence_parallel: bool = False) -> Any:
    """The columns that `PredictionWriter` stores for the initial weights."""
    from examples.gpt.gpt_components import build_trainer

    masked_text = import_here("masked_text")
    run, module = make_run(folder, sizes), masked_text.make_module()
    trainer: Any = build_trainer(run, sequence_parallel=sequence_parallel)
    trainer.predict(module, masked_text.make_data(sizes))
    (writer,) = [each for each in trainer.callbacks if type(each).__name__ == "PredictionWriter"]
    stored = writer.outputs()
    return stored and [vars(block) for block in stored]
