"""Which rank reads which files of a checkpoint while the job saves it; what SGD saves."""

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
    layout: Any,
    precision: str,
    momentum: float,
    folder: Path,
    max_steps: int,
    resume: str | None = None,
    distributed: bool = False,
) -> dict[str, np.ndarray]:
    """Returns the weights and the momenta after so many steps."""
    from megatron.core.optimizer import OptimizerConfig
    from nemo.lightning.pytorch.optim import MegatronOptimizerModule

    import megakit.training
    import model_pretrain as script

    def sgd(lr: float, *_: Any) -> Any:
        config = OptimizerConfig(optimizer="sgd", lr=10 * lr, sgd_momentum=momentum)
        return MegatronOptimizerModule(config=config)

    how = {"max_steps": max_steps, "val_interval": 4, "precision": precision}
    options = jobs.options_of("pretrain", folder, **how)
    run = jobs.make_run(script.PRETRAIN, options, layout, resume=resume)
    with mock.patch.object(megakit.training, "megatron_adam", sgd):
        module, data, trainer = jobs.built_by(script.pretrain, run)
    trainer.strategy.ddp_config.use_distributed_optimizer = distributed
    megakit.training.train(model=module, data=data, trainer=trainer, resume=run.resume)
    states = trainer.optimizers[0].mcore_optimizer.optimizer.state.values()
    momenta = (value.numpy() for state in states for value in state.values())
    return jobs.weights_of(module) | {f"momentum {i}": one for i, one in enumerate(momenta)}


@pytest.mark.parametrize(
    ("layout", "precision", "momentum"),
    [
        (jobs.layout(1), "bf16-mixed", 0.9),
        pytest.param(jobs.layout(2), "32", 0.0, marks=pytest.mark.long),
        pytest.param(jobs.layout(2, tensor=2), "32", 0.9, marks=pytest.mark.long),
    ],
)
def test_sgd_resumes_bit_by_bit(
    ranks: Any, tmp_path: Path, layout: Any, precision: str, momentum: float
) -> None:
    """Megatron has no function that creates the state of SGD before a load."""

    def train(name: str, *how: Any) -> Any:
        arguments = (layout, precision, momentum, tmp_path / name, *how)
        return ranks.run(train_sgd, *arguments, world_size=layout.world_size)

    whole = train("whole", 4)
    train("parts", 2)
    resumed = train("parts", 4, str(tmp_path / "parts" / "pretrain/checkpoints/step=000002"))
    assert all(("momentum 0" in rank) == bool(momentum) for rank in whole)
    np.testing.assert_equal(resumed, whole)


def test_the_distributed_optimizer_refuses_sgd(ranks: Any, tmp_path: Path) -> None:
    told = "use_distributed_optimizer=True: Megatron's distributed optimizer can save only Adam"
    with pytest.raises(RankError, match=told):
        ranks.run(train_sgd, jobs.layout(), "32", 0.9, tmp_path, 1, None, True, world_size=1)
