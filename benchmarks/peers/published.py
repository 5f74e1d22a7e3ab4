"""The published tutorial's way of feeding, training and saving, written anew so that it runs.

    PYTHONPATH=.:benchmarks python benchmarks/peers/published.py pretrain [options]

One stage in one process (pretrain, finetune, predict), NeMo's logger, checkpoint callback and
resumption, all as there and with none of our cuts. What is ours is what it needs on a CPU
(`use_accelerator`), the resampler, and the config that loads a part of a checkpoint. Prints a line
of JSON with the times at which steps ended.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Literal

from megakit.runtime import use_accelerator

ACCELERATOR: Literal["cpu", "gpu"] = "gpu" if "--gpu" in sys.argv else "cpu"
use_accelerator(ACCELERATOR)

import torch  # noqa: E402
from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402
from nemo import lightning as nl  # noqa: E402
from nemo.lightning import NeMoLogger, resume  # noqa: E402
from nemo.lightning.pytorch import callbacks as nl_callbacks  # noqa: E402

from peers import published_components as parts  # noqa: E402


def strategy() -> Any:
    return nl.MegatronStrategy(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        ddp="megatron",
        find_unused_parameters=True,
        always_save_context=True,
        # In the background, saves that overlap share one queue of results, and are torn.
        ckpt_async_save=False,
    )


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Pretrains or fine-tunes."""
    save_dir = options.folder / options.stage
    checkpoints = nl_callbacks.ModelCheckpoint(
        save_last=True,
        save_on_train_epoch_end=True,
        monitor="reduced_train_loss",
        every_n_train_steps=options.interval,
        always_save_context=True,
    )
    logger = NeMoLogger(
        log_dir=str(save_dir),
        name="example",
        tensorboard=TensorBoardLogger(save_dir=str(save_dir), name="example"),
        ckpt=checkpoints,
    )
    config: Any = parts.AutoencoderConfig()
    if options.stage == "finetune":
        config = parts.ClassifierConfig(
            initial_ckpt_path=options.checkpoint,
            initial_ckpt_skip_keys_with_these_prefixes={"digit_classifier"},
        )
    module = parts.Module(config)
    tracker = parts.Tracker()
    trainer = nl.Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        strategy=strategy(),
        limit_val_batches=5,
        val_check_interval=options.interval,
        max_steps=options.steps,
        max_epochs=10,
        num_nodes=1,
        log_every_n_steps=25,
        callbacks=[tracker],
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
    )
    resumption = resume.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    logger.setup(trainer, resume_if_exists=True)
    resumption.setup(trainer, module)
    trainer.fit(module, datamodule=parts.Data(options.data_dir, options.batch_size))
    return {
        "ends": tracker.ends,
        "processor": tracker.processor,
        "losses": [float(loss) for loss in tracker.losses],
        "checkpoint": checkpoints.last_model_path.removesuffix(".ckpt"),
    }


def predict(options: argparse.Namespace) -> dict[str, Any]:
    """Predicts the test images, in one batch and in the resampled order."""
    trainer = nl.Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        strategy=strategy(),
        num_nodes=1,
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
        callbacks=None,
    )
    module = parts.Module(parts.ClassifierConfig(initial_ckpt_path=options.checkpoint))
    data = parts.Data(options.data_dir, 10_000)
    logits = torch.cat(trainer.predict(module, datamodule=data))
    if not options.score:
        return {"predictions": len(logits)}
    # Labels do not come with the predictions; whoever knows the order can look them up.
    labels = torch.tensor([data.test[index]["label"] for index in range(len(logits))])
    return {"accuracy": float((logits.argmax(dim=1) == labels).float().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description="A stage of the published tutorial.")
    parser.add_argument("stage", choices=["pretrain", "finetune", "predict"])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--folder", type=Path, default=Path("runs-published"))
    parser.add_argument("--checkpoint", help="of the stage before")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--interval", type=int, default=25, help="of validation and saves")
    parser.add_argument("--gpu", action="store_true", help="compute on it, and not on the CPU")
    parser.add_argument("--score", action="store_true", help="have predict tell its accuracy")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    told = predict(options) if options.stage == "predict" else train(options)
    print(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    main()
