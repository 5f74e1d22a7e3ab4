"""Values of a validation in one process; several: tests/parallel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


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


def validate(module: Any, callback: Any, batches: list[Any], **loss: Any) -> dict[str, float]:
    """Logged values of a validation, whose losses are 1, 2, ..."""
    steps = {"validation": SimpleNamespace(loss=SimpleNamespace(**loss))}
    strategy = SimpleNamespace(root_device=torch.device("cpu"), steps=steps)
    trainer = SimpleNamespace(strategy=strategy)
    callback.on_validation_start(trainer, module)
    for number, (batch, output) in enumerate(batches, start=1):
        callback.update_metrics(batch, output)
        output.zero_()  # as a loss may do
        callback.on_validation_batch_end(trainer, module, {"loss": torch.tensor(number)})
    callback.on_validation_epoch_end(trainer, module)
    return dict(module.logged)


def batch_of(right: int, wrong: int, padding: int = 0, weights: Any = None) -> Any:
    """A micro batch and logits; padding is classified right, so that it would be noticed."""
    label = torch.arange(right + wrong + padding) % 3
    predicted = label.clone()
    predicted[right : right + wrong] += 1
    mask = torch.ones(len(label)) if weights is None else weights
    mask[right + wrong :] = 0
    return {"label": label, "loss_mask": mask}, torch.eye(4)[predicted]


def test_metrics_over_all_micro_batches_without_padding() -> None:
    from megakit.training.validation import ExactValidation

    module, callback = Module(accuracy=accuracy()), ExactValidation()
    batches = [batch_of(3, 1), batch_of(0, 1, padding=3), batch_of(0, 0, padding=4)]
    expected = {"val_loss": 2, "val_accuracy": pytest.approx(0.6)}
    assert validate(module, callback, batches) == expected
    # The next validation starts from nothing; a mask of tokens says which samples are real.
    weights = torch.ones(6, 5)
    weights[:, 2:] = 0
    found = validate(module, callback, [batch_of(1, 3, 2, weights)], num_tokens=torch.tensor(7))
    assert found == {"val_loss": 1, "val_accuracy": 0.25}


def test_a_value_of_the_loss_and_a_metric_of_one_name_are_refused() -> None:
    """Else the metric's value would silently take the place of the loss's."""
    from megakit.training.validation import ExactValidation

    with pytest.raises(UserError, match="'loss': the loss also returns a value"):
        validate(Module(loss=accuracy()), ExactValidation(), [batch_of(3, 1)])


def test_whether_a_higher_value_is_better() -> None:
    """A metric says it by itself or is declared, as is the value of a loss or a callback."""
    from torchmetrics import MeanMetric

    from megakit.training import ValidationMetric
    from megakit.training.validation import higher_is_better

    module: Any = Module(
        accuracy=accuracy(),
        inverted=accuracy(higher_is_better=False),
        mean=ValidationMetric(MeanMetric(), lambda batch, out: (out,)),
    )
    module.validation_loss_reduction = lambda: SimpleNamespace(higher_is_better={"margin"})
    trainer: Any = SimpleNamespace(callbacks=[SimpleNamespace(higher_is_better=["share"])])
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
