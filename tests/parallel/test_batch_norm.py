"""Buffers under data parallelism: running statistics are averaged, other differences are refused.

`train` and `in_plain_torch` run in the pool's processes.
"""

import filecmp
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.parallel import jobs
from tests.parallel.test_named_values import in_plain_torch
from tests.scripts import read_csv, read_json

DP2 = jobs.layout(2)  # with two micro batches in a step


def add_batch_norm(trunk: Any) -> None:
    from torch import nn

    trunk.relu = nn.Sequential(nn.BatchNorm1d(64), nn.ReLU())


def add_frozen_batch_norm(trunk: Any) -> None:
    """A layer in evaluation mode, whose statistics wrongly depend on the rank."""
    from megatron.core import parallel_state

    add_batch_norm(trunk)
    layer = trunk.relu[0].eval()
    layer.train = lambda mode: layer
    layer.running_mean += parallel_state.get_data_parallel_rank()


def add_usage(trunk: Any, persistent: bool = True) -> None:
    """A buffer that each forward pass changes."""
    import torch

    def count(module: Any, inputs: Any, output: Any) -> None:
        if module.training:
            trunk.usage += output.sum()

    trunk.register_buffer("usage", torch.zeros(()), persistent)
    trunk.relu.register_forward_hook(count)


def changed(change: Any) -> Any:
    """Lets a function change the first stage of a model."""
    from model_components import ExampleModelTrunk

    build = ExampleModelTrunk.__init__

    def init(self: Any, config: Any) -> None:
        build(self, config)
        if self.pre_process:
            change(self)

    return mock.patch.object(ExampleModelTrunk, "__init__", init)


def train(
    layout: Any,
    folder: Path,
    change: Any,
    stop: int = 0,
    resume: str | None = None,
    more: Any = None,
) -> str:
    """Trains 8 steps, or gets a signal after a step; returns the error that ended the training."""
    import model_finetune as script
    from megakit.errors import Stopped, UserError
    from megakit.runtime.signals import handlers_restored
    from megakit.training import train
    from megakit.training.stopping import StopSignals

    how: dict[str, Any] = {"max_steps": 8, "val_interval": 4, "save_interval": 8, "lr": 0.05}
    how |= {"checkpoint": "none"} | (more or {})
    options = jobs.options_of("finetune", folder, **how)
    run = jobs.make_run(script.FINETUNE, options, layout, resume=resume)

    def signal_after(_: Any, step: int) -> int:
        return 15 if step == stop > 0 else 0

    with (
        changed(change),
        mock.patch.object(StopSignals, "received", signal_after),
        handlers_restored(),
    ):
        module, data, trainer = jobs.built_by(script.finetune, run)
        try:
            train(model=module, data=data, trainer=trainer, resume=run.resume)
            run.finish(trainer)
        except (Stopped, UserError) as error:
            return str(error)
    return ""


def validated(checkpoint: str) -> list[float]:
    with changed(add_batch_norm):
        return in_plain_torch(checkpoint)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(DP2, "32", marks=pytest.mark.long),
        pytest.param(DP2, "bf16-mixed", marks=pytest.mark.long),
        pytest.param(jobs.layout(4, pipeline=2), "32", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_and_its_validations(
    ranks: Any, tmp_path: Path, layout: Any, precision: str
) -> None:
    """They are those of an uninterrupted run, and the validated model is the saved one."""

    def start(name: str, *how: Any) -> list[str]:
        arguments = (layout, tmp_path / name, add_batch_norm, *how)
        found: list[str] = ranks.run(train, *arguments, world_size=layout.world_size)
        return found

    more = {"precision": precision}
    assert not any(start("whole", 0, None, more))
    assert set(start("stopped", 3, None, more)) == {"SIGTERM after step 3"}
    saved = tmp_path / "stopped" / "finetune/checkpoints/step=000003"
    assert not any(start("stopped", 0, str(saved), more))
    whole, parts = (tmp_path / name / "finetune" for name in ("whole", "stopped"))
    last = whole / "checkpoints" / "step=000008"
    for file in (whole / "metrics.csv", *last.glob("weights/*.distcp")):
        assert filecmp.cmp(file, parts / file.relative_to(whole), shallow=False)
    ((*_, loss),) = ranks.run(validated, str(last), world_size=1)
    summary = read_json(whole / "summary.json")
    assert summary["val_loss"]["last"] == pytest.approx(
        loss, rel=1e-5 if precision == "32" else 1e-2
    )
    assert summary["batch_norm_samples"] == layout.micro_batch_size


@pytest.mark.parametrize(
    ("change", "name", "intervals"),
    [
        (add_usage, "usage", {}),
        (add_usage, "usage", {"val_interval": 8, "save_interval": 2}),
        (add_frozen_batch_norm, "relu.0.running_mean", {}),
    ],
)
def test_another_buffer_that_differs_is_refused(
    ranks: Any, tmp_path: Path, change: Any, name: str, intervals: dict[str, int]
) -> None:
    """At the first validation or save, by all ranks; nobody averages a frozen layer."""
    told, *others = ranks.run(train, DP2, tmp_path, change, 0, None, intervals, world_size=2)
    assert f"Buffer {name}: its values differ between data-parallel ranks" in told
    assert others == [told]
    assert not [*(tmp_path / "finetune").glob("checkpoints/step=*")]
    assert len(read_csv(tmp_path / "finetune" / "metrics.csv")) == 1


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        (DP2, partial(add_usage, persistent=False)),
        pytest.param(jobs.layout(2, tensor=2), add_usage, marks=pytest.mark.long),
    ],
)
def test_a_buffer_is_accepted(ranks: Any, tmp_path: Path, layout: Any, change: Any) -> None:
    """One that is not saved, and one that only other kinds of ranks have another value of."""
    assert not any(ranks.run(train, layout, tmp_path, change, world_size=2))
