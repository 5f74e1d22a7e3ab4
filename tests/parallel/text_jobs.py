"""What the pool's ranks run: trainings of a tiny language model, in any layout."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megakit.errors import Stopped, UserError
from megakit.job.layout import Layout
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.plan import Plan
from megakit.job.script import Run
from megakit.job.stage import Stage
from megakit.reporting.console import Console
from megakit.runtime.accelerator import find_accelerator

GLOBAL_BATCH, STEPS = 8, 20
FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True)
class How:
    """How to train.

    Attributes:
        strategy: Options of the strategy.
        config: Fields of the model's config.
        precision: Precision of the training.
        stop_before: The run stops before this step, with a checkpoint.
        resume: The checkpoint to resume from; None for a new run.
        val_interval: Steps between two validations.
    """

    strategy: Any = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    precision: Literal["32", "bf16-mixed"] = "32"
    stop_before: int | None = None
    resume: str | None = None
    val_interval: int = STEPS


@dataclass(frozen=True)
class Trained:
    """What a rank saw: losses by step on the last stage, weights, and Adam's state."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    adam: list[np.ndarray]
    optimizer: str
    checkpoint: str
    val_loss: float


def layout(
    world_size: int = 1, tensor: int = 1, pipeline: int = 1, micro_batches: int = 2
) -> Layout:
    data = world_size // (tensor * pipeline)
    micro = GLOBAL_BATCH // data // micro_batches
    return Layout(world_size, 1, tensor, pipeline, GLOBAL_BATCH, micro)


def refusal(layout: Layout, folder: Path, how: How) -> str:
    """The error with which a training is refused."""
    try:
        train(layout, folder, how)
    except UserError as error:
        return str(error)
    return "not refused"


def make_run(layout: Layout, folder: Path, how: How) -> Run[TrainingOptions]:
    stage = Stage(
        name="pretrain",
        script="model_pretrain.py",
        model="LanguageModel",
        width="hidden_size",
        num_pipeline_stages=4,
    )
    options = TrainingOptions(
        output_dir=folder,
        precision=how.precision,
        max_steps=STEPS,
        lr=3e-3,
        global_batch_size=GLOBAL_BATCH,
        val_interval=how.val_interval,
        save_interval=STEPS,
    )
    identity = {**options.identity(), "model": stage.model, "dataset": "bytes"}
    identity["best_by"] = options.choice()
    accelerator = find_accelerator("cpu")
    plan = Plan(
        *("bytes", None, how.resume, accelerator, how.precision, layout, identity), is_done=False
    )
    is_main = os.environ.get("RANK", "0") == "0"
    run = Run(stage, options, plan, Console(silent=True), is_main, began=0.0)
    run.path.mkdir(parents=True, exist_ok=True)
    return run


def train(layout: Layout, folder: Path, how: How) -> Trained:
    """Trains from the start or from a checkpoint, to the end or to a stop."""
    sys.path.insert(0, FOLDER)
    import tiny_gpt  # type: ignore[import-not-found]
    from nemo import lightning as nl

    from megakit.training import build_trainer, cosine_annealing, megatron_adam
    from megakit.training.trainer import train as fit

    run = make_run(layout, folder, how)
    config = tiny_gpt.GptConfig(**how.config)
    schedule = cosine_annealing(STEPS)
    module = tiny_gpt.GptModule(config, megatron_adam(3e-3, schedule))
    data = tiny_gpt.Data(config.block_size, layout.micro_batch_size, GLOBAL_BATCH)
    watch = tiny_gpt.Watch(how.stop_before)
    trainer = build_trainer(run, strategy=how.strategy, callbacks=[watch])
    resume = nl.AutoResume(resume_from_path=how.resume) if how.resume else None
    stopped = False
    try:
        fit(model=module, data=data, trainer=trainer, resume=resume)
    except Stopped:
        stopped = True
    assert stopped == (how.stop_before is not None)
    optimizer = trainer.optimizers[0].mcore_optimizer.chained_optimizers[0]
    last = sorted(run.directory.checkpoints.iterdir())[-1]
    return Trained(
        losses=watch.losses,
        weights={
            name.replace("module.", ""): weight.detach().float().numpy().copy()
            for name, weight in module.named_parameters()
        },
        adam=[
            optimizer.optimizer.state[weight][name].detach().numpy().copy()
            for group in optimizer.optimizer.param_groups
            for weight in group["params"]
            for name in ("step", "exp_avg", "exp_avg_sq")
        ],
        optimizer=type(optimizer).__name__,
        checkpoint=str(last),
        val_loss=float(trainer.callback_metrics.get("val_loss", float("nan"))),
    )


def predict(layout: Layout, folder: Path, checkpoint: str, strategy: Any) -> Any:
    """Logits (N, S, vocabulary) of the validation blocks, in their order; None unless on rank 0."""
    sys.path.insert(0, FOLDER)
    import tiny_gpt

    from megakit.training import build_trainer
    from megakit.training import predict as predict_with

    stage = Stage(name="predict", script="model_predict.py", model="LanguageModel", width=32)
    options = CommonOptions(output_dir=folder, precision="32")
    plan = Plan(
        *("bytes", checkpoint, None, find_accelerator("cpu"), "32", layout, {}), is_done=False
    )
    run = Run(stage, options, plan, Console(silent=True), is_main=False, began=0.0)
    config = tiny_gpt.GptConfig(initial_ckpt_path=checkpoint)
    data = tiny_gpt.Data(config.block_size, layout.micro_batch_size, GLOBAL_BATCH)
    trainer: Any = build_trainer(run, strategy=strategy)
    outputs = predict_with(model=tiny_gpt.GptModule(config), data=data, trainer=trainer)
    return None if outputs is None else outputs.output[outputs.idx.argsort()]
