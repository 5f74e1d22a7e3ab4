"""Metrics of a validation in one process; several: tests/parallel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def trainer() -> Any:
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"), observers=[], validated_names=["loss"]
    )
    return SimpleNamespace(strategy=strategy, callbacks=[], enable_validation=True)


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
        for observe in trainer.strategy.observers:
            observe(batch, output)
        output.zero_()  # as a loss may do
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
    @pytest.mark.parametrize("held_bytes", [0, 1 << 20])
    def test_over_all_micro_batches_without_padding(
        self, trainer: Any, held_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from megakit.training import ValidationMetrics, validation

        monkeypatch.setattr(validation, "HELD_BYTES", held_bytes)
        module: Any = Module(accuracy=accuracy())
        callback = ValidationMetrics(module.metrics)
        batches = [batch_of(3, 1), batch_of(0, 1, padding=3), batch_of(0, 0, padding=4)]
        assert validate(trainer, module, callback, batches) == {"val_accuracy": pytest.approx(0.6)}
        assert trainer.strategy.observers == []
        # The next validation starts from nothing; a mask of tokens says which samples are real.
        weights = torch.ones(6, 5)
        weights[:, 2:] = 0
        batches = [batch_of(1, 3, 2, weights)]
        assert validate(trainer, module, callback, batches) == {"val_accuracy": 0.25}

    def test_an_interrupted_validation_is_forgotten(self, trainer: Any) -> None:
        from megakit.training import ValidationMetrics

        module: Any = Module(accuracy=accuracy())
        callback = ValidationMetrics(module.metrics)
        callback.on_validation_start(trainer, module)
        trainer.strategy.observers[0](*batch_of(0, 4))
        assert validate(trainer, module, callback, [batch_of(4, 0)]) == {"val_accuracy": 1.0}
        assert trainer.strategy.observers == []

    def test_arguments_have_a_row_for_each_sample(self, trainer: Any) -> None:
        from megakit.training import ValidationMetric, ValidationMetrics

        short = ValidationMetric(accuracy().metric, lambda batch, out: (out[:2], batch["label"]))
        module: Any = Module(short=short)
        callback = ValidationMetrics(module.metrics)
        with pytest.raises(ValueError, match="validation metric short: its arguments have 2 rows"):
            validate(trainer, module, callback, [batch_of(3, 1)])

    def test_the_name_of_a_value_of_the_loss_is_refused(self, trainer: Any) -> None:
        """Else the metric's value would silently take the place of the loss's."""
        from megakit.training import ValidationMetrics

        trainer.strategy.validated_names = ["loss", "accuracy"]
        module: Any = Module(accuracy=accuracy())
        callback = ValidationMetrics(module.metrics)
        with pytest.raises(UserError, match="'accuracy': the loss also returns a value"):
            validate(trainer, module, callback, [batch_of(3, 1)])


def test_whether_a_higher_value_is_better(trainer: Any) -> None:
    """A metric says it by itself or is declared, as is the value of a loss or a callback."""
    from torchmetrics import MeanMetric

    from megakit.training import ValidationMetric, ValidationMetrics
    from megakit.training.validation import higher_is_better

    metrics = {
        "accuracy": accuracy(),
        "inverted": accuracy(higher_is_better=False),
        "mean": ValidationMetric(MeanMetric(), lambda batch, out: (out,)),
    }
    module: Any = Module()
    module.validation_loss_reduction = lambda: SimpleNamespace(higher_is_better={"margin"})
    trainer.callbacks = [ValidationMetrics(metrics), SimpleNamespace(higher_is_better=["share"])]
    highest = {"accuracy": True, "inverted": False, "margin": True, "share": True, "loss": False}
    for name, expected in highest.items():
        assert higher_is_better(f"val_{name}", trainer, module) == expected, name
    with pytest.raises(UserError, match=r"--best-by val_mean: MeanMetric does not say"):
        higher_is_better("val_mean", trainer, module)


def test_values_of_an_earlier_validation_are_dropped() -> None:
    """Lightning keeps them until they are logged again."""
    from megakit.training.reporter import Reporter

    reporter = Reporter(None, "pretrain", None, None)  # type: ignore[arg-type]
    logged = {"val_rare": 7.0, "val_loss": 1.0, "train_loss": 2.0}
    trainer: Any = SimpleNamespace(callback_metrics=logged)
    module: Any = None
    reporter.on_validation_start(trainer, module)
    assert logged == {"train_loss": 2.0}
