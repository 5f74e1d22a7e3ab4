"""Named values and metrics of a validation in one process. (Several: tests/parallel.)"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


class TestNames:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (torch.tensor(2.0, requires_grad=True), {"loss": 2.0}),
            ({"loss": torch.tensor(2.0), "size": 3}, {"loss": 2.0, "size": 3.0}),
            ({"loss": torch.tensor([2.0]), "size": torch.tensor(True)}, {"loss": 2.0, "size": 1.0}),
        ],
    )
    def test_scalars(self, values: Any, expected: dict[str, float]) -> None:
        from megakit.training.validation import checked, to_floats

        scalars = checked(values, "it")
        assert to_floats(scalars) == expected
        assert not any(value.requires_grad for value in scalars.values())
        assert {(value.dtype, value.shape) for value in scalars.values()} == {(torch.float32, ())}

    @pytest.mark.parametrize(
        ("values", "problem"),
        [
            ({"loss": torch.ones(2)}, r"it returned 'loss' of shape \(2,\)"),
            ({"loss": torch.tensor(1.0), "a,b": torch.tensor(1.0)}, "it returned a value named"),
            ({"loss": torch.tensor(1.0), 5: torch.tensor(1.0)}, "a value named 5"),
        ],
    )
    def test_what_is_none(self, values: Any, problem: str) -> None:
        from megakit.training.validation import checked

        with pytest.raises(ValueError, match=problem):
            checked(values, "it")

    def test_names_do_not_change_between_steps(self) -> None:
        from megakit.training.validation import FromLastStage

        from_last_stage = FromLastStage()
        one, cpu = {"loss": torch.tensor(1.0), "size": torch.tensor(2.0)}, torch.device("cpu")
        assert list(from_last_stage(one, cpu)) == ["loss", "size"]
        with pytest.raises(ValueError, match="returned loss, and before that loss, size"):
            from_last_stage(torch.tensor(1.0), cpu)


@pytest.fixture
def trainer() -> Any:
    from nemo.lightning.megatron_parallel import CallbackConnector

    return SimpleNamespace(
        strategy=SimpleNamespace(
            root_device=torch.device("cpu"), model=SimpleNamespace(callbacks=CallbackConnector())
        ),
        callbacks=[],
        sanity_checking=False,
        enable_validation=True,
        should_stop=False,
        global_step=0,
        callback_metrics={},
        state=SimpleNamespace(fn="fit"),
    )


class Module:
    """As much of a Lightning module as a validation needs."""

    def __init__(self, **metrics: Any) -> None:
        self.metrics, self.logged = metrics, dict[str, float]()

    def validation_metrics(self) -> dict[str, Any]:
        return self.metrics

    def log(self, name: str, value: Any, **_: Any) -> None:
        self.logged[name] = float(value)


def accuracy(**more: Any) -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    from megakit.training import ValidationMetric

    return ValidationMetric(
        MulticlassAccuracy(average="micro"), lambda batch, output: (output, batch["label"]), **more
    )


def validate(trainer: Any, module: Any, callback: Any, batches: list[Any]) -> dict[str, float]:
    callback.on_validation_start(trainer, module)
    for batch, output in batches:
        trainer.strategy.model.callbacks.event(
            "on_megatron_microbatch_end", step=None, batch=batch, output=output
        )
    callback.on_validation_epoch_end(trainer, module)
    callback.on_validation_end(trainer, module)
    return dict(module.logged)


def batch_of(right: int, wrong: int, padding: int = 0, weights: Any = None) -> Any:
    """A micro batch and logits; padding is classified right, so that it would be noticed."""
    label = torch.arange(right + wrong + padding) % 3
    predicted = label.clone()
    predicted[right : right + wrong] += 1
    mask = torch.ones(len(label)) if weights is None else weights
    mask[right + wrong :] = 0
    return {"label": label, "loss_mask": mask}, torch.eye(4)[predicted]


class TestMetrics:
    def test_over_all_micro_batches_without_padding(self, trainer: Any) -> None:
        from megakit.training.validation import metrics_of

        module: Any = Module(accuracy=accuracy())
        (callback,) = metrics_of(module)
        connector = trainer.strategy.model.callbacks
        assert connector.callbacks == {}  # a training step calls nothing
        batches = [batch_of(3, 1), batch_of(0, 1, padding=3), batch_of(0, 0, padding=4)]
        assert validate(trainer, module, callback, batches) == {"val_accuracy": pytest.approx(0.6)}
        assert connector.callbacks == {"on_megatron_microbatch_end": []}
        # The next validation starts from nothing.
        assert validate(trainer, module, callback, [batch_of(1, 3)]) == {"val_accuracy": 0.25}

    def test_a_mask_of_tokens_says_which_samples_are_real(self, trainer: Any) -> None:
        from megakit.training.validation import metrics_of

        module: Any = Module(accuracy=accuracy())
        (callback,) = metrics_of(module)
        weights = torch.ones(4, 5)
        weights[:, 2:] = 0
        found = validate(trainer, module, callback, [batch_of(1, 1, 2, weights)])
        assert found == {"val_accuracy": 0.5}

    def test_arguments_have_a_row_for_each_sample(self, trainer: Any) -> None:
        from megakit.training import ValidationMetric
        from megakit.training.validation import metrics_of

        short = ValidationMetric(accuracy().metric, lambda batch, out: (out[:2], batch["label"]))
        module: Any = Module(short=short)
        (callback,) = metrics_of(module)
        with pytest.raises(ValueError, match="validation metric short: its arguments have 2 rows"):
            validate(trainer, module, callback, [batch_of(3, 1)])

    def test_the_name_of_the_loss_is_refused(self) -> None:
        """Else the metric's value would silently take the place of the validation loss."""
        from megakit.training.validation import metrics_of

        with pytest.raises(UserError, match=r"validation metric 'loss': the column val_loss "):
            metrics_of(Module(loss=accuracy()))

    def test_the_name_of_a_value_of_the_loss_is_refused(self, trainer: Any) -> None:
        from megakit.training.validation import metrics_of

        trainer.strategy.validated_names = ["loss", "accuracy"]
        module: Any = Module(accuracy=accuracy())
        (callback,) = metrics_of(module)
        with pytest.raises(UserError, match="'accuracy': the loss also returns a value"):
            validate(trainer, module, callback, [batch_of(3, 1)])

    def test_a_module_without_any(self) -> None:
        from megakit.training.validation import metrics_of

        assert metrics_of(Module()) == metrics_of(object()) == []

    def test_the_tutorial_s_classifier_has_an_accuracy(self) -> None:
        from model_components import BionemoLightningModule, ExampleFineTuneConfig, PretrainConfig

        assert list(BionemoLightningModule(ExampleFineTuneConfig()).validation_metrics()) == [
            "accuracy"
        ]
        assert BionemoLightningModule(PretrainConfig()).validation_metrics() == {}


class TestDirection:
    @pytest.mark.parametrize("declared", [None, True, False])
    def test_a_metric_says_it(self, trainer: Any, declared: bool | None) -> None:
        from megakit.training.validation import higher_is_better, metrics_of

        trainer.callbacks = metrics_of(Module(accuracy=accuracy(higher_is_better=declared)))
        module: Any = Module()
        found = higher_is_better("val_accuracy", trainer, module)
        assert found == (declared is not False)

    def test_a_metric_that_does_not_say(self, trainer: Any) -> None:
        from torchmetrics import MeanMetric

        from megakit.training import ValidationMetric
        from megakit.training.validation import higher_is_better, metrics_of

        mean = ValidationMetric(MeanMetric(), lambda batch, out: (out,))
        module: Any = Module(mean=mean)
        trainer.callbacks = metrics_of(module)
        with pytest.raises(UserError, match=r"--best-by val_mean: MeanMetric does not say"):
            higher_is_better("val_mean", trainer, module)

    def test_a_loss_or_a_callback_declares_it(self, trainer: Any) -> None:
        from megakit.training.validation import higher_is_better

        module: Any = Module()
        module.validation_loss_reduction = lambda: SimpleNamespace(higher_is_better={"margin"})
        trainer.callbacks = [SimpleNamespace(higher_is_better=["share"]), SimpleNamespace()]
        found = {
            name: higher_is_better(f"val_{name}", trainer, module)
            for name in ("margin", "share", "loss", "other")
        }
        assert found == {"margin": True, "share": True, "loss": False, "other": False}


class TestStopping:
    def stopper(
        self, by: str = "val_loss", stop_after: int | None = 2, highest: bool = False
    ) -> Any:
        from megakit.training.callbacks import StopWithoutProgress

        writer: Any = SimpleNamespace(best_by=by, best_is_highest=highest, wanted_step=None)
        return StopWithoutProgress(writer, stop_after)

    def feed(self, stopper: Any, trainer: Any, values: list[float], name: str = "val_loss") -> int:
        """Validates until it stops; returns how often."""
        for value in values:
            trainer.global_step += 10
            trainer.callback_metrics[name] = torch.tensor(value)
            may_stop = stopper.may_stop
            stopper.on_validation_end(trainer, None)
            if trainer.should_stop:
                assert may_stop, "the pictures of the last validation are not drawn"
                break
        return int(trainer.global_step // 10)

    @pytest.mark.parametrize(
        ("values", "highest", "count"),
        [
            ([3, 2, 1, 1, 1, 0], False, 5),  # an equal value is not a better one
            ([3, 4, 2, 3, 1, 2, 0], False, 7),
            ([0.1, 0.2, 0.1, 0.1, 0.9], True, 4),
            ([math.nan, math.nan, math.nan, 1], False, 3),
            ([math.nan, math.nan, 1, math.nan, math.nan], False, 5),
        ],
    )
    def test_after_so_many_without_a_better_one(
        self, trainer: Any, values: list[float], highest: bool, count: int
    ) -> None:
        stopper = self.stopper(highest=highest)
        assert self.feed(stopper, trainer, values) == count

    @pytest.mark.parametrize("changed", ["fn", "sanity_checking"])
    def test_only_validations_of_training_count(self, trainer: Any, changed: str) -> None:
        """Not `trainer.validate()`, and not the check before training."""
        if changed == "fn":
            trainer.state.fn = "validate"
        else:
            trainer.sanity_checking = True
        stopper = self.stopper(stop_after=1)
        assert self.feed(stopper, trainer, [1, 2, 3]) == 3
        assert (stopper.best, stopper.num_without) == (None, 0)
        assert stopper.writer.wanted_step is None

    @pytest.mark.parametrize(
        ("by", "is_highest"), [("val_accuracy", True), ("val_loss", False), ("last", False)]
    )
    def test_the_writer_is_told_which_value_is_best(
        self, trainer: Any, by: str, is_highest: bool
    ) -> None:
        from megakit.training.validation import metrics_of

        module: Any = Module(accuracy=accuracy())
        trainer.callbacks = metrics_of(module)
        stopper = self.stopper(by)
        stopper.on_fit_start(trainer, module)
        assert stopper.writer.best_is_highest == is_highest

    def test_never_by_default(self, trainer: Any) -> None:
        assert self.feed(self.stopper(stop_after=None), trainer, [1, 2, 3, 4, 5]) == 5
        assert not trainer.should_stop

    def test_it_goes_on_counting_from_a_checkpoint(self, trainer: Any) -> None:
        first, second = self.stopper(), self.stopper()
        self.feed(first, trainer, [1, 2])
        second.load_state_dict(first.state_dict())
        assert not trainer.should_stop
        self.feed(second, trainer, [1.5])
        assert trainer.should_stop

    def test_each_better_value_is_saved(self, trainer: Any) -> None:
        stopper = self.stopper()
        wanted = []
        for value in (3.0, 4.0, 2.0):
            self.feed(stopper, trainer, [value])
            wanted.append(stopper.writer.wanted_step)
        assert wanted == [10, 10, 30]

    def test_an_unknown_name(self, trainer: Any) -> None:
        stopper = self.stopper(by="val_accuray")
        trainer.callback_metrics["val_accuracy"] = torch.tensor(0.5)
        with pytest.raises(UserError, match=r"val_accuray.*There are val_accuracy, val_loss, last"):
            self.feed(stopper, trainer, [1.0])

    @pytest.mark.parametrize(
        ("by", "stop_after", "named"),
        [
            ("val_loss", 2, "--stop-after:"),
            ("val_x", None, "--best-by:"),
            ("val_x", 1, "--best-by and --stop-after:"),
        ],
    )
    def test_without_validation_data(
        self, trainer: Any, by: str, stop_after: int | None, named: str
    ) -> None:
        trainer.enable_validation = False
        with pytest.raises(UserError, match=named):
            self.stopper(by, stop_after).on_train_start(trainer, None)
        self.stopper("val_loss", None).on_train_start(trainer, None)
