"""Trains in several starts, and prints which samples each step and each validation read, as JSON.

A program of its own: each start is a process, as NeMo allows one layout in each.
"""

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

GLOBAL = 96
STEPS = 17  # of 96 samples, in epochs of 1,297: the first ends within step 14


def start(
    folder: Path, name: str, micro: int, workers: int, stop: int, resume: str | None, answer: Any
) -> None:
    """Trains up to step `stop`, saves a checkpoint of this name, and answers with what was read."""
    from nemo import lightning as nl

    from megakit.data import WrappedDataLoader
    from megakit.job.layout import Layout
    from megakit.training import megatron_adam
    from megakit.training.trainer import build_strategy
    from model_components import BionemoLightningModule, MNISTDataModule, PretrainConfig

    class Data(MNISTDataModule):
        def val_dataloader(self) -> Any:
            # Two, neither with a mode of validation; `train` is WrappedDataLoader's default.
            return [super().val_dataloader(), WrappedDataLoader(dataset=self.mnist_val)]

    read: dict[str, list[Any]] = {"train": [], "validation": [], "consumed": []}

    class Module(BionemoLightningModule):
        def forward(self, batch: Any, batch_idx: int | None = None, **options: Any) -> Any:
            idx = batch["idx"].tolist()
            if self.training:
                read["train"].append(idx)
            else:
                read["validation"].append(idx)
            return super().forward(batch, batch_idx, **options)

        def on_validation_end(self) -> None:
            read["consumed"].append(data.consumed_samples)

    data = Data(
        dataset="digits", batch_size=micro, global_batch_size=GLOBAL, corruption=0.3,
        num_workers=workers,
    )  # fmt: skip
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=build_strategy(Layout(1, 1, 1, 1, GLOBAL, micro)),
        plugins=nl.MegatronMixedPrecision(precision="32"),
        max_steps=STEPS,
        limit_val_batches=2,
        val_check_interval=5,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[stop_at(stop, folder / name)],
    )
    module = Module(config=PretrainConfig(), optimizer=megatron_adam(1e-3))
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    answer.send(read)


def stop_at(step: int, checkpoint: Path) -> Any:
    """A callback that saves a checkpoint after a step, and ends the training there."""
    from megakit.training.callbacks import ExactSteps

    class StopAt(ExactSteps):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(checkpoint)
                trainer.should_stop = True

    return StopAt()


def main() -> None:
    from megakit.runtime import use_accelerator

    use_accelerator("cpu")
    import model_components  # noqa: F401 - once for all starts

    processes = multiprocessing.get_context("fork")
    starts: list[tuple[str, int, int, int, str | None]] = [
        ("whole", 96, 0, STEPS, None),
        ("first", 96, 0, 7, None),
        ("second", 24, 2, 13, "first"),
        ("third", 48, 0, STEPS, "second"),
    ]
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, micro, workers, stop, before in starts:
            answer, asked = processes.Pipe(duplex=False)
            resume = str(folder / before) if before else None
            arguments = (folder, label, micro, workers, stop, resume, asked)
            process = processes.Process(target=start, args=arguments)
            process.start()
            asked.close()
            found[label] = answer.recv()
            process.join()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
