"""What the pool's ranks run: the scripts' own work on the bundled digits, and what came of it."""

import importlib
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megakit.job.console import Console
from megakit.job.layout import Layout
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.run import Run
from megakit.job.run_directory import Stage
from megakit.runtime.accelerator import find_accelerator, use_accelerator

GLOBAL_BATCH = 64
#: The package of the chain on Megatron-Core alone; that of the chain with NeMo is "".
MEGATRON = "examples.megatron."


def layout(
    world_size: int = 1, tensor: int = 1, pipeline: int = 1, micro_batches: int = 2
) -> Layout:
    """A layout in which each step is accumulated over so many micro batches."""
    data = world_size // (tensor * pipeline)
    micro = GLOBAL_BATCH // data // micro_batches
    return Layout(world_size, 1, tensor, pipeline, GLOBAL_BATCH, micro)


@dataclass
class Trained:
    """What one rank saw of a training run.

    Attributes:
        place: Its tensor-parallel rank, its pipeline stage, and its data-parallel rank.
        losses: Of every step, where it is known: on the last stage.
        samples: Of every step and micro batch: index and checksum of each sample, (M, micro, 2).
        first: The weights before the first step, by name, as far as this rank has them.
        last: The weights after the last step.
        seconds: What all steps took.
        optimizer: Class of Megatron's optimizer.
        buckets: Parts in which Megatron reduces the gradients.
        gathers_late: Whether the next forward pass gathers the weights.
        best: The checkpoint that is said to be the best.
    """

    place: tuple[int, int, int] = (0, 0, 0)
    losses: list[float] = field(default_factory=list)
    samples: list[np.ndarray] = field(default_factory=list)
    first: dict[str, np.ndarray] = field(default_factory=dict)
    last: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0
    optimizer: str = ""
    buckets: int = 0
    gathers_late: bool = False
    best: str = ""


def make_run(
    stage: Stage,
    options: CommonOptions,
    layout: Layout,
    start: str | None = None,
    resume: str | None = None,
    dataset: str = "digits",
) -> Run:
    """What a script's work is given, as `plan` would have planned it."""
    identity: dict[str, Any] = {}
    if isinstance(options, TrainingOptions):
        identity = options.identity()
        identity |= {"dataset": dataset, "best_by": options.selects_by()}
    run = Run(
        stage=stage,
        options=options,
        layout=layout,
        accelerator=find_accelerator("cpu"),
        precision="bf16-mixed" if options.precision == "auto" else options.precision,
        dataset=dataset,
        console=Console(silent=True),
        start=start,
        resume=resume,
        identity=identity,
        is_main=os.environ.get("RANK", "0") == "0",
    )
    run.path.mkdir(parents=True, exist_ok=True)
    return run


def options_of(stage: str, folder: Path, **more: Any) -> Any:
    """Options of a script, for the digits in float32; its package may precede the stage."""
    package, dot, stage = stage.rpartition(".")
    of_all: dict[str, Any] = {"output_dir": folder, "dataset": "digits", "precision": "32"}
    if stage != "predict":
        of_all["global_batch_size"] = GLOBAL_BATCH
    script = importlib.import_module(f"{package}{dot}model_{stage}")
    return getattr(script, f"{stage.title()}Options")(**of_all | more)


def use_ddp(trainer: Any, names: Sequence[str]) -> None:
    """Switches on options of Megatron's DistributedDataParallelConfig, as in `build_trainer`."""
    # Without a size, one bucket would hold all weights of a small model, and nothing would overlap.
    vars(trainer.strategy.ddp_config).update(dict.fromkeys(names, True), bucket_size=64)


def pretrain(
    layout: Layout,
    folder: Path,
    max_steps: int,
    ddp: Sequence[str] = (),
    package: str = "",
    **more: Any,
) -> Trained:
    """`model_pretrain.py`, with a look at every step."""
    from megatron.core import parallel_state

    script = importlib.import_module(f"{package}model_pretrain")
    intervals = {"val_interval": max(1, max_steps // 2), "save_interval": max_steps}
    resume = more.pop("resume", None)
    how = {"max_steps": max_steps, "lr": 1e-3, **intervals, **more}
    options = options_of(f"{package}pretrain", folder, **how)
    run = make_run(script.PRETRAIN, options, layout, resume=resume)
    found = Trained()
    work = train_alone if package else train_with_nemo
    optimizer, ddp_module = work(script, run, ddp, found)
    found.place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    steps, samples = max_steps - run.resumed_step, found.samples
    found.samples = [*np.stack(samples).reshape(steps, -1, *samples[0].shape)]
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    found.optimizer = type(parts[0]).__name__
    found.buckets = len(ddp_module.bucket_groups)
    found.gathers_late = bool(ddp_module.remove_forward_pre_hook_handles)
    return found


def seen(batch: Any) -> np.ndarray:
    """Index and checksum of each sample of a micro batch, corruption included."""
    sums = [zlib.crc32(image.tobytes()) for image in batch["corrupted"].numpy()]
    return np.stack([batch["idx"].numpy(), np.array(sums)], axis=1)


def train_with_nemo(script: Any, run: Run, ddp: Sequence[str], found: Trained) -> tuple[Any, Any]:
    """Trains; returns Megatron's optimizer, and what it wrapped around the model."""
    import lightning.pytorch as pl
    from megatron.core import parallel_state

    from megakit.training import train

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        if module.training:
            found.samples.append(seen(inputs[0]))

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            found.first = weights_of(pl_module)
            found.seconds = -time.monotonic()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            if parallel_state.is_pipeline_last_stage():
                found.losses.append(float(outputs["loss"]))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.seconds += time.monotonic()
            found.last = weights_of(pl_module)

        def __deepcopy__(self, memo: object) -> "Watch":
            return self  # NeMo copies callbacks in order to record them

    module, data, trainer = built_by(script.pretrain, run)
    module.register_forward_pre_hook(look)
    use_ddp(trainer, ddp)
    trainer.callbacks.append(Watch())
    train(model=module, data=data, trainer=trainer, resume=run.resume)
    found.best = Path(trainer.checkpoint_callback.best_model_path).name
    return trainer.optimizers[0].mcore_optimizer, trainer.strategy.model[0].module


def train_alone(script: Any, run: Run, ddp: Sequence[str], found: Trained) -> tuple[Any, Any]:
    """Likewise, on Megatron-Core alone; `ddp` may ask for sequence parallelism, too."""
    use_accelerator("cpu", uses_nemo=False)
    from megatron.core import tensor_parallel

    from examples.megatron import model_components, training_loop
    from megakit.training.gathering import means_on_all_ranks

    parts: Any = []

    class Watched(training_loop.Training):
        def run_to_the_end(self, next_verb: str | None = None) -> Path:
            forward_step, model = self.forward_step, self.parts.model

            def look(batches: Any, model: Any) -> Any:
                batch = next(batches)
                if model.training:
                    found.samples.append(seen(batch))
                return forward_step(iter([batch]), model)

            self.forward_step, found.first = look, weights_of(model)
            parts.extend((self.parts.optimizer, model))
            return super().run_to_the_end(next_verb)

        def train_step(self, batches: Any) -> Any:
            done = super().train_step(batches)
            found.losses += means_on_all_ranks("", done[2]).values()
            return done

    class Sharded(model_components.Autoencoder):
        """Tensor-parallel ranks share the samples between the layers that are split."""

        def __init__(self, config: Any) -> None:
            config.sequence_parallel = True
            super().__init__(config)

        def forward(self, x: Any) -> Any:
            x_hat = super().forward(tensor_parallel.scatter_to_sequence_parallel_region(x))
            return tensor_parallel.gather_from_sequence_parallel_region(
                x_hat, tensor_parallel_output_grad=False
            )

    run.options.distributed_optimizer = "use_distributed_optimizer" in ddp
    model = Sharded if "sequence_parallel" in ddp else model_components.Autoencoder
    with (
        mock.patch.object(training_loop, "Training", Watched),
        mock.patch.object(model_components, "Autoencoder", model),
    ):
        found.best = script.pretrain(run).name
    found.last = weights_of(parts[1])
    return parts[0], parts[1]


def finetune(
    layout: Layout,
    folder: Path,
    max_steps: int = 100,
    start: str | None = None,
    ddp: Sequence[str] = (),
    package: str = "",
) -> str:
    """A classifier after a few steps from nothing or from a checkpoint; its checkpoint."""
    from megakit.training import train

    script = importlib.import_module(f"{package}model_finetune")
    sizes = dict.fromkeys(("max_steps", "val_interval", "save_interval"), max_steps)
    # At the default rate, a difference in rounding grows by orders of magnitude in some ten steps.
    options = options_of(f"{package}finetune", folder, checkpoint="none", lr=5e-3, **sizes)
    run = make_run(script.FINETUNE, options, layout, start=start)
    if package:
        options.distributed_optimizer = bool(ddp)
        return str(script.finetune(run))
    module, data, trainer = built_by(script.finetune, run)
    use_ddp(trainer, ddp)
    train(model=module, data=data, trainer=trainer)
    return str(run.finish(trainer))


def predict(layout: Layout, folder: Path, checkpoint: str, package: str = "") -> str:
    """`model_predict.py`; the path of predictions.csv."""
    script = importlib.import_module(f"{package}model_predict")
    options = options_of(f"{package}predict", folder)
    return str(script.predict(make_run(script.PREDICT, options, layout, start=checkpoint)))


def built_by(work: Callable[[Run], object], run: Run) -> tuple[Any, Any, Any]:
    """The Lightning module, the data module and the trainer that a script would train with."""
    import megakit.training

    with mock.patch.object(megakit.training, "train") as train, mock.patch.object(run, "finish"):
        work(run)
    return tuple(train.call_args.kwargs[name] for name in ("model", "data", "trainer"))


def weights_of(pl_module: Any) -> dict[str, np.ndarray]:
    """This rank's weights, without the names of what Megatron wrapped around the model."""
    return {
        name.replace("module.", ""): weight.detach().float().cpu().numpy().copy()
        for name, weight in pl_module.named_parameters()
    }
