"""Training goes on at the right sample, evaluation starts at the first."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scripts import output_of, read_json

pytestmark = pytest.mark.usefixtures("megatron")

NUMBERS: Any = list(range(100))


def make_module(**sampler_options: Any) -> Any:
    from megakit.data import ExactDataSampler, MegatronDataModule

    module = MegatronDataModule()
    module.data_sampler = ExactDataSampler(
        **{"seq_len": 1, "micro_batch_size": 4, "global_batch_size": 8, **sampler_options}
    )
    return module


def at_step(module: Any, step: int) -> Any:
    module.trainer = SimpleNamespace(global_step=step)
    return module


def test_a_checkpoint_remembers_and_a_new_start_goes_on() -> None:
    first = at_step(make_module(), 0)
    first.trainer.global_step = 7
    state = first.state_dict()
    assert state["consumed_samples"] == first.consumed_samples == 56

    second = at_step(make_module(), 0)
    second.load_state_dict(state)  # as Lightning does, before it restores the step
    second.trainer.global_step = 7
    sampler = second.data_sampler
    assert (sampler.init_consumed_samples, sampler.init_global_step) == (56, 7)
    second.trainer.global_step = 9
    assert second.consumed_samples == 72


def test_codes_of_nemo_may_store_the_step_at_any_time() -> None:
    module = at_step(make_module(), 0)
    for step in (3, 10, 0):  # the last is another trainer's, for a model of its own
        module.trainer.global_step = step
        module.update_init_global_step()
        assert module.consumed_samples == module.data_sampler.init_consumed_samples == 8 * step


def test_a_batch_size_that_ramps_up_is_refused() -> None:
    module = at_step(make_module(rampup_batch_size=[4, 4, 8]), 3)
    with pytest.raises(ValueError, match="constant global batch size"):
        module.state_dict()


def test_another_global_batch_size_goes_on_after_the_same_sample() -> None:
    module = at_step(make_module(global_batch_size=16), 7)
    module.load_state_dict({"consumed_samples": 56, "global_step": 7})
    module.trainer.global_step = 8
    assert module.consumed_samples == 56 + 16


def limited(micro_batches: int, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Any:
    module = make_module()
    module.val_set = NUMBERS
    names = ("train", "val", "test", "predict")
    every = {f"limit_{name}_batches": limits.get(name, 1.0) for name in names}
    module.trainer = SimpleNamespace(num_sanity_val_steps=2, **every)
    count = property(lambda self: micro_batches)
    monkeypatch.setattr(type(module.data_sampler), "num_microbatches", count)
    module.reconfigure_limit_batches()
    module.reconfigure_limit_batches()  # NeMo asks again for each fit, validate, ...
    return module.trainer


def test_limits_are_numbers_of_global_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = limited(4, monkeypatch, val=5, test=0.0)
    assert (trainer.limit_val_batches, trainer.num_sanity_val_steps) == (20, 8)
    assert (trainer.limit_train_batches, trainer.limit_test_batches) == (1.0, 0.0)
    assert limited(1, monkeypatch, val=0.5).limit_val_batches == 0.5
    with pytest.raises(ValueError, match=r"limit_val_batches=0\.5: with 4 micro batches"):
        limited(4, monkeypatch, val=0.5)


def with_datasets(**options: Any) -> Any:
    """A data module whose class does no more than name its datasets."""
    from megakit.data import IdentityMultiEpochDatasetWrapper, MegatronDataModule

    class Data(MegatronDataModule):
        def setup(self, stage: str) -> None:
            self.train_set = self.resample(IdentityMultiEpochDatasetWrapper(NUMBERS))
            self.val_set, self.test_set = NUMBERS[:10], NUMBERS[:20]

    return Data(4, 8, **options)


def test_loaders_follow_from_the_datasets() -> None:
    module = at_step(with_datasets(num_workers=1), 3)
    module.trainer.max_steps = 30
    module.setup("fit")
    assert len(module.train_set) == 30 * 8  # as long as the training
    for method, name, mode in (
        ("train", "train_set", "train"),
        ("val", "val_set", "validation"),
        ("test", "test_set", "test"),
        ("predict", "test_set", "predict"),
    ):
        made = getattr(module, f"{method}_dataloader")()
        assert made.mode == mode
        assert made.dataset is getattr(module, name)
        assert made.num_workers == 1
    assert module.consumed_samples == 24
    assert module.data_sampler.global_batch_size == 8


def test_one_pass_without_a_trainer_in_the_seed_s_order() -> None:
    orders = []
    for seed in (1, 2):
        module = with_datasets(seed=seed)
        module.setup("fit")
        orders.append([module.train_set[index] for index in range(100)])
        assert sorted(orders[-1]) == NUMBERS
    assert orders[0] != orders[1]


def test_without_a_dataset_there_is_no_loader() -> None:
    from megakit.data import MegatronDataModule

    module = MegatronDataModule(4)
    module.test_set = NUMBERS
    assert module.predict_dataloader().dataset is NUMBERS
    with pytest.raises(ValueError, match=r"MegatronDataModule\.train_set is None\. Assign"):
        module.train_dataloader()
    assert module.data_sampler.global_batch_size == 4
    assert not hasattr(MegatronDataModule(), "data_sampler")  # the subclass's to assign


@pytest.mark.long
def test_training_without_validation(tmp_path: Path) -> None:
    """As modules for NeMo or BioNeMo train that have a training loader alone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    program = """
import sys
from megakit.job.script import run_script
from model_pretrain import PRETRAIN, PretrainOptions, pretrain

def work(run):
    import model_components

    class Data(model_components.MNISTDataModule):
        def setup(self, stage):
            super().setup(stage)
            self.val_set = None

    model_components.MNISTDataModule = Data
    return pretrain(run)

run_script(PRETRAIN, PretrainOptions, work)
"""
    options = ("--dataset", "digits", "--accelerator", "cpu", "--output-dir", tmp_path)
    output_of(program, *options, "--max-steps", "24", "--val-interval", "12")
    rows = (tmp_path / "pretrain" / "metrics.csv").read_text().splitlines()
    assert rows[-1].startswith("24,3072,")
    assert {row.split(",")[3] for row in rows[1:]} == {""}  # no val_loss
    assert (tmp_path / "pretrain" / "checkpoints" / "step=000024").is_dir()
    # The curve of the speed: the times between its points are those of the steps.
    events = EventAccumulator(str(tmp_path / "pretrain" / "tensorboard" / "train")).Reload()
    points = events.Scalars("pretrain/samples_per_second")
    speeds = {point.step: point.value for point in points}
    steps = pairwise([0, *speeds])
    seconds = sum(128 * (step - before) / speeds[step] for before, step in steps)
    summary = read_json(tmp_path / "pretrain" / "summary.json")
    assert seconds == pytest.approx(24 / summary["steps_per_second"], rel=0.5)
