"""What the pool's ranks run: the scripts' own work on the bundled digits, and what came of it."""

import importlib
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megakit.job.layout import Layout
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.plan import Plan
from megakit.job.run import Run
from megakit.job.runs import Stage
from megakit.reporting.console import Console
from megakit.runtime.accelerator import find_accelerator

GLOBAL_BATCH = 64


def layout(
    world_size: int = 1, tensor: int = 1, pipeline: int = 1, micro_batches: int = 2
) -> Layout:
    """A layout in which each step is accumulated over so many micro batches."""
    data = world_size // (tensor * pipeline)
    micro = GLOBAL_BATCH // data // micro_batches
    return Layout(world_size, 1, tensor, pipeline, GLOBAL_BATCH, micro)


@dataclass(frozen=True)
class Trained:
    """What one rank saw of a training run.

    Attributes:
        tensor_rank: Its place.
        pipeline_rank: Its place.
        data_rank: Its place.
        losses: Of every step, where it is known: on the last stage.
        samples: Of every step and micro batch: index and checksum of each sample, (M, micro, 2).
        first: The weights before the first step, by name, as far as this rank has them.
        last: The weights after the last step.
        optimizer: Class of Megatron's optimizer.
        best: The checkpoint that is said to be the best.
    """

    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    losses: list[float]
    samples: list[np.ndarray]
    first: dict[str, np.ndarray]
    last: dict[str, np.ndarray]
    optimizer: str
    best: str


def make_run(
    stage: Stage,
    options: CommonOptions,
    layout: Layout,
    start: str | None = None,
    resume: str | None = None,
    dataset: str = "digits",
) -> Run:
    """What a script's work is given, as `make_plan` would have planned it."""
    identity: dict[str, Any] = {}
    if isinstance(options, TrainingOptions):
        identity = options.identity()
        identity |= {"dataset": dataset, "best_by": options.selects_by()}
    accelerator = find_accelerator("cpu")
    precision = "bf16-mixed" if options.precision == "auto" else options.precision
    plan = Plan(
        layout=layout,
        accelerator=accelerator,
        precision=precision,
        dataset=dataset,
        start=start,
        resume=resume,
        identity=identity,
    )
    is_main = os.environ.get("RANK", "0") == "0"
    run = Run(stage, options, plan, Console(silent=True), is_main, began=0.0)
    run.path.mkdir(parents=True, exist_ok=True)
    return run


def pretrain(
    layout: Layout,
    folder: Path,
    max_steps: int = 50,
    use_distributed_optimizer: bool = False,
) -> Trained:
    """`model_pretrain.py`, with a look at every step."""
    import lightning.pytorch as pl
    from megatron.core import parallel_state

    from megakit.training import train

    script = importlib.import_module("model_pretrain")
    options = script.PretrainOptions(
        output_dir=folder,
        dataset="digits",
        precision="32",
        max_steps=max_steps,
        lr=1e-3,
        global_batch_size=GLOBAL_BATCH,
        val_interval=max(1, max_steps // 2),
        save_interval=max_steps,
    )
    run = make_run(script.PRETRAIN, options, layout)
    samples: list[np.ndarray] = []
    losses: list[float] = []
    weights: list[dict[str, np.ndarray]] = []

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        if module.training:
            samples.append(_fingerprints(inputs[0]))

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            weights.append(weights_of(pl_module))

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *args: Any
        ) -> None:
            if parallel_state.is_pipeline_last_stage():
                losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            weights.append(weights_of(pl_module))

        def __deepcopy__(self, memo: object) -> "Watch":
            return self  # NeMo copies callbacks in order to record them

    module, data, trainer = built_by(script.pretrain, run)
    module.register_forward_pre_hook(look)
    trainer.strategy.ddp_config.use_distributed_optimizer = use_distributed_optimizer
    trainer.callbacks.append(Watch())
    train(model=module, data=data, trainer=trainer)
    return Trained(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        losses=losses,
        samples=_by_step(samples, max_steps),
        first=weights[0],
        last=weights[1],
        optimizer=_optimizer(trainer.optimizers[0].mcore_optimizer),
        best=Path(trainer.checkpoint_callback.best_model_path).name,
    )


def finetune(layout: Layout, folder: Path) -> str:
    """A classifier after a few steps from nothing; its checkpoint."""
    script = importlib.import_module("model_finetune")
    options = script.FinetuneOptions(
        output_dir=folder,
        dataset="digits",
        precision="32",
        max_steps=100,
        global_batch_size=GLOBAL_BATCH,
        checkpoint="none",
        val_interval=100,
        save_interval=100,
    )
    return str(script.finetune(make_run(script.FINETUNE, options, layout)))


def predict(layout: Layout, folder: Path, checkpoint: str) -> str:
    """`model_predict.py` in float32; the path of predictions.csv."""
    script = importlib.import_module("model_predict")
    options = script.PredictOptions(output_dir=folder, dataset="digits", precision="32")
    return str(script.predict(make_run(script.PREDICT, options, layout, start=checkpoint)))


def built_by(work: Callable[[Run], object], run: Run) -> tuple[Any, Any, Any]:
    """The Lightning module, the data module and the trainer that a script would train with."""
    import megakit.training

    with mock.patch.object(megakit.training, "train") as train, mock.patch.object(run, "finish"):
        work(run)
    return tuple(train.call_args.kwargs[name] for name in ("model", "data", "trainer"))


def _fingerprints(batch: Any) -> np.ndarray:
    """Index and checksum of each sample, (B, 2): of what the model sees, corruption included."""
    images = batch["corrupted"].numpy()
    sums = [zlib.crc32(image.tobytes()) for image in images]
    return np.stack([batch["idx"].numpy(), np.array(sums, dtype=np.int64)], axis=1)


def _by_step(samples: Sequence[np.ndarray], num_steps: int) -> list[np.ndarray]:
    micro_batches = len(samples) // num_steps
    return [
        np.stack(samples[step * micro_batches : (step + 1) * micro_batches])
        for step in range(num_steps)
    ]


def _optimizer(mcore_optimizer: Any) -> str:
    chained = getattr(mcore_optimizer, "chained_optimizers", [mcore_optimizer])
    return type(chained[0]).__name__


def weights_of(pl_module: Any) -> dict[str, np.ndarray]:
    """This rank's weights, without the names of what Megatron wrapped around the model."""
    return {
        name.replace("module.", ""): weight.detach().float().cpu().numpy().copy()
        for name, weight in pl_module.named_parameters()
    }
