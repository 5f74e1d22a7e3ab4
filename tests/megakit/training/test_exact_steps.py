"""A training by `megakit.training.train` that is killed and resumed does what a whole one does.

As a program, this file prints for each case the events of an uninterrupted training, and of a
killed and resumed one. The trainings are forked, so that the frameworks are imported once.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import run_python

#: For each case: options of the trainer, samples of a micro batch, steps between checkpoints, and
#: where the first training is killed: as a step begins, or as the validation after a step begins.
CASES: dict[str, tuple[dict[str, Any], int, int, tuple[str, int]]] = {
    "before a validation": ({"max_epochs": 1, "val_check_interval": 3}, 4, 1, ("validation", 3)),
    "in a later epoch, two micro batches": ({"max_epochs": 2}, 2, 1, ("step", 7)),
    "distributed optimizer": ({"max_epochs": 2}, 2, 1, ("step", 7)),
    "steps instead of epochs": (
        {"max_steps": 14, "max_epochs": 10, "val_check_interval": 4},
        *(4, 4, ("step", 8)),
    ),
}


def data_module(micro_batch_size: int) -> Any:
    """24 samples in steps of 4; 8 samples for validation."""
    from megakit.data import MegatronDataModule

    def sample(index: int) -> dict[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(index)
        return {"data": torch.rand(1, 28, 28, generator=generator), "label": 0, "idx": index}

    data = MegatronDataModule(micro_batch_size, 4)
    data.train_set, data.val_set = [sample(i) for i in range(24)], [sample(i) for i in range(8)]
    return data


def run(folder: Path, log: Path, case: str, killed: bool) -> None:
    """Trains until the end, or until the training is killed; logs the events."""
    import lightning.pytorch as pl
    import torch
    from nemo import lightning as nl
    from nemo.lightning import NeMoLogger, resume
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint

    from megakit.training import train
    from model_components import BionemoLightningModule, PretrainConfig

    options, micro_batch_size, every, (where, at) = CASES[case]
    file = log.open("a")

    def event(*what: Any) -> None:
        file.write(json.dumps(what) + "\n")
        file.flush()

    class Recorder(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if killed and where == "step" and trainer.global_step >= at:
                os._exit(0)

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            weights = sum(weight.double().sum().item() for weight in module.parameters())
            event("step", trainer.global_step, weights)

        def on_validation_start(self, trainer: Any, *args: Any) -> None:
            if killed and where == "validation" and trainer.global_step >= at:
                os._exit(0)
            event("validation", trainer.global_step)

    torch.manual_seed(0)
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=nl.MegatronStrategy(always_save_context=True),
        plugins=nl.MegatronMixedPrecision(precision="32"),
        num_sanity_val_steps=0,
        callbacks=[Recorder()],
        **options,
    )
    checkpoint = ModelCheckpoint(
        save_last=True,
        save_top_k=-1,
        every_n_train_steps=every,
        save_optim_on_train_end=True,
    )
    module = BionemoLightningModule(config=PretrainConfig())
    module.optim.config.use_distributed_optimizer = case == "distributed optimizer"
    train(
        model=module,
        data=data_module(micro_batch_size),
        trainer=trainer,
        log=NeMoLogger(
            log_dir=str(folder), name="run", ckpt=checkpoint, use_datetime_version=False
        ),
        resume=resume.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True),
    )


def forked(folder: Path, log: Path, case: str, killed: bool) -> None:
    if process := os.fork():
        os.waitpid(process, 0)
        return
    try:
        output = os.open(os.devnull, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        run(folder, log, case, killed)
    except BaseException:
        with log.open("a") as file:
            file.write(json.dumps(["error", traceback.format_exc()]) + "\n")
    os._exit(0)


def main() -> None:
    from megakit.runtime import use_accelerator

    use_accelerator("cpu")
    import model_components  # noqa: F401 - once for all trainings

    folder, told = Path(sys.argv[1]), {}
    for number, case in enumerate(sys.argv[2:]):
        logs = [folder / f"{number}-{name}.jsonl" for name in ("whole", "parts")]
        forked(folder / f"{number}-whole", logs[0], case, False)
        forked(folder / f"{number}-parts", logs[1], case, True)
        forked(folder / f"{number}-parts", logs[1], case, False)
        told[case] = [[json.loads(line) for line in log.open()] for log in logs]
    print(json.dumps(told))


@pytest.mark.long
def test_steps_weights_and_validations(tmp_path: Path) -> None:
    variables: Any = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(__file__, tmp_path, *CASES, timeout=300, **variables)
    assert done.status == 0, done.err[-3000:]
    for case, (whole, parts) in json.loads(done.out.splitlines()[-1]).items():
        assert len(whole) > 6
        assert {kind for kind, *_ in whole} == {"step", "validation"}, case
        assert parts == whole, case


if __name__ == "__main__":
    main()
