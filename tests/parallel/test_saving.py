"""Which rank reads which files of a checkpoint while the job saves it; what SGD saves."""

import importlib
import itertools
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megakit.checkpoints import verify
from megakit.testing import RankError
from tests.parallel import jobs


def files_read(folder: Path, world_size: int) -> list[str]:
    """Trains two steps, and saves; returns which files of the checkpoint this rank has read."""
    read = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[1] == "r" and "/.step=" in str(arguments[0]):
            read.append(Path(arguments[0]).name)

    sys.addaudithook(watch)  # for the rest of this rank's process
    jobs.pretrain(jobs.layout(world_size), folder, max_steps=2)
    return read


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_hashes_the_files_that_it_wrote(
    ranks: Any, tmp_path: Path, world_size: int
) -> None:
    """Rank 0 would need longer than a time-out for the bytes of a thousand ranks."""
    read = ranks.run(files_read, tmp_path, world_size, world_size=world_size)
    manifest = verify(tmp_path / "pretrain" / "checkpoints" / "step=000002")
    files = [Path(name).name for name in manifest.files]
    assert sorted(name for names in read for name in names) == sorted(files)  # once each
    for rank, names in enumerate(read):
        own = {name for name in names if name.endswith(".distcp")}
        assert own
        assert {name.split("_")[2] for name in own} == {str(rank)}


def train_sgd(
    world_size: int,
    tensor: int,
    precision: str,
    momentum: float,
    folder: Path,
    resumes: bool,
    distributed: bool = False,
) -> dict[str, np.ndarray]:
    """Trains four steps, or the last two from a checkpoint; returns weights and momenta."""
    import lightning.pytorch as pl
    from megatron.core.optimizer import OptimizerConfig
    from nemo.lightning.pytorch.optim import MegatronOptimizerModule

    import megakit.training

    def sgd(lr: float, *_: Any) -> Any:
        config = OptimizerConfig(optimizer="sgd", lr=10 * lr, sgd_momentum=momentum)
        return MegatronOptimizerModule(config=config)

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if run.is_main and trainer.global_step == 3 and not resumes:
                shutil.copytree(run.path / "checkpoints" / "step=000002", kept)

        def __deepcopy__(self, memo: object) -> "Keep":
            return self  # NeMo copies callbacks in order to record them

    script, kept = importlib.import_module("model_pretrain"), folder / "step=000002"
    how = {"max_steps": 4, "save_interval": 2, "val_interval": 4, "precision": precision}
    options = jobs.options_of("pretrain", folder, **how)
    layout = jobs.layout(world_size, tensor)
    run = jobs.make_run(script.PRETRAIN, options, layout, resume=str(kept) if resumes else None)
    with mock.patch.object(megakit.training, "megatron_adam", sgd):
        module, data, trainer = jobs.built_by(script.pretrain, run)
    trainer.callbacks.append(Keep())
    trainer.strategy.ddp_config.use_distributed_optimizer = distributed
    megakit.training.train(model=module, data=data, trainer=trainer, resume=run.resume)
    states = trainer.optimizers[0].mcore_optimizer.optimizer.state.values()
    momenta = (value.numpy() for state in states for value in state.values())
    return jobs.weights_of(module) | {f"momentum {i}": one for i, one in enumerate(momenta)}


SHORT = (((1, 1), "32", 0.9), ((1, 1), "bf16-mixed", 0.0))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in SHORT else pytest.mark.long, id=str(case))
        for case in itertools.product(((1, 1), (2, 1), (2, 2)), ("32", "bf16-mixed"), (0.9, 0.0))
    ],
)
def test_sgd_resumes_bit_by_bit(ranks: Any, tmp_path: Path, case: Any) -> None:
    """Megatron has no function that creates the state of SGD before a load."""
    (world_size, tensor), precision, momentum = case
    how = (train_sgd, world_size, tensor, precision, momentum, tmp_path)
    whole, resumed = (ranks.run(*how, flag, world_size=world_size) for flag in (False, True))
    for before, after in zip(whole, resumed, strict=True):
        assert ("momentum 0" in before) == bool(momentum)
        assert after.keys() == before.keys()
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_the_distributed_optimizer_refuses_sgd(ranks: Any, tmp_path: Path) -> None:
    told = "use_distributed_optimizer=True: Megatron's distributed optimizer can save only Adam"
    with pytest.raises(RankError, match=told):
        ranks.run(train_sgd, 1, 1, "32", 0.9, tmp_path, False, True, world_size=1)
