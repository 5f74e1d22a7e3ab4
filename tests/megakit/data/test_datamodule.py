"""Training goes on at the right sample, evaluation starts at the first."""

import itertools
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.scripts import output_of, read_json, run_python

pytestmark = pytest.mark.usefixtures("megatron")

MODES = {"train": "train", "val": "validation", "test": "test", "predict": "predict"}


NUMBERS: Any = list(range(100))


def loader() -> DataLoader:
    return DataLoader(NUMBERS)


def make_module(make: Any = loader, **sampler_options: Any) -> Any:
    """A data module whose four methods each return what `make` makes."""
    from megakit.data import ExactDataSampler, MegatronDataModule

    class Data(MegatronDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.data_sampler = ExactDataSampler(
                **{"seq_len": 1, "micro_batch_size": 4, "global_batch_size": 8, **sampler_options}
            )

        def train_dataloader(self) -> Any:
            return make()

        def val_dataloader(self) -> Any:
            return make()

        def test_dataloader(self) -> Any:
            return make()

        def predict_dataloader(self) -> Any:
            return make()

    return Data()


def at_step(module: Any, step: int) -> Any:
    module.trainer = SimpleNamespace(global_step=step)
    return module


@pytest.mark.parametrize("method", MODES)
def test_a_loader_without_a_mode_gets_the_methods(method: str) -> None:
    from lightning.pytorch.utilities import CombinedLoader

    from megakit.data import WrappedDataLoader

    def wrapped(**options: Any) -> DataLoader:
        return WrappedDataLoader(dataset=NUMBERS, **options)

    def get(make: Any) -> Any:
        return getattr(make_module(make), f"{method}_dataloader")()

    mode = MODES[method]
    assert get(loader).mode == mode
    assert get(wrapped).mode == mode, "its default is train"
    assert [one.mode for one in get(lambda: [loader(), wrapped()])] == [mode, mode]
    nested = get(lambda: {"a": loader(), "b": (wrapped(), "no loader")})
    assert (nested["a"].mode, nested["b"][0].mode) == (mode, mode)
    combined = get(lambda: CombinedLoader([loader(), wrapped()], "sequential"))
    assert [one.mode for one in combined.flattened] == [mode, mode]
    assert get(lambda: []) == []
    assert get(lambda: wrapped(mode="test")).mode == "test", "a mode that was chosen stays"


def test_a_checkpoint_remembers_and_a_new_start_goes_on() -> None:
    first = at_step(make_module(), 0)
    first.train_dataloader()
    first.trainer.global_step = 7
    state = first.state_dict()
    assert state["consumed_samples"] == first.consumed_samples == 56

    second = at_step(make_module(), 0)
    second.load_state_dict(state)  # as Lightning does, before it restores the step
    second.trainer.global_step = 7
    second.train_dataloader()
    sampler = second.data_sampler
    assert (sampler.init_consumed_samples, sampler.init_global_step) == (56, 7)
    second.trainer.global_step = 9
    assert second.consumed_samples == 72


def test_validation_loaders_made_on_the_way_change_no_count() -> None:
    """Lightning makes them before the first validation, maybe hundreds of steps after the start."""
    module = at_step(make_module(), 0)
    module.train_dataloader()
    for step in (3, 10):
        module.trainer.global_step = step
        module.val_dataloader()
        assert module.consumed_samples == 8 * step
        sampler = module.data_sampler  # of which NeMo computes its own figure
        assert sampler.init_consumed_samples == 8 * sampler.init_global_step == 8 * step


def test_training_on_or_anew_with_the_same_module() -> None:
    module = at_step(make_module(), 0)
    module.train_dataloader()
    at_step(module, 10).train_dataloader()
    assert module.data_sampler.init_consumed_samples == 80
    at_step(module, 0).train_dataloader()  # another trainer, for a model of its own
    assert module.data_sampler.init_consumed_samples == 0


def test_another_global_batch_size_goes_on_after_the_same_sample() -> None:
    module = at_step(make_module(global_batch_size=16), 7)
    module.load_state_dict({"consumed_samples": 56, "global_step": 7})
    module.trainer.global_step = 8
    assert module.consumed_samples == 56 + 16


def limited(micro_batches: int, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Any:
    module = make_module()
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
    of_mode = {"train": "train_set", "val": "val_set", "test": "test_set", "predict": "test_set"}
    for method, name in of_mode.items():
        made = getattr(module, f"{method}_dataloader")()
        assert made.mode == MODES[method]
        assert made.dataset is getattr(module, name)
        assert made.num_workers == 1
    assert module.data_sampler.init_consumed_samples == 24
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


# --- In a real training ---------------------------------------------------------------------------


@pytest.mark.long
def test_stops_other_layouts_and_validations_change_no_sample() -> None:
    """NeMo's trainer, stopped twice, the second part with other micro batches and workers."""
    from model_components import MNISTDataModule

    told = run_python(Path(__file__).with_name("resumption.py"), OMP_NUM_THREADS="1").output()
    found = json.loads(told.splitlines()[-1])

    data = MNISTDataModule(dataset="digits")
    data.setup("fit")
    resampled: Any = data.mnist_train
    resampled = type(resampled)(resampled.dataset, num_samples=17 * 96)
    expected = [resampled[index]["idx"] for index in range(17 * 96)]
    assert len(set(expected[:1297])) == 1297, "the first epoch"

    def flat(batches: list[list[int]]) -> list[int]:
        return list(itertools.chain.from_iterable(batches))

    assert flat(found["whole"]["train"]) == expected
    assert {len(batch) for batch in found["second"]["train"]} == {24}
    stopped = flat([flat(found[part]["train"]) for part in ("first", "second", "third")])
    assert stopped == expected
    for part in found.values():
        # Two loaders, two global batches of 96 from each, as often as it validated.
        assert flat(part["validation"]) == [*range(192)] * 2 * len(part["consumed"])
    assert found["whole"]["consumed"] == [96 * step for step in (5, 10, 15, 17)]
    assert found["third"]["consumed"] == [96 * step for step in (15, 17)]
