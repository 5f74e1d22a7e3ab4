"""Values of a validation in one process; several: tests/parallel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


def accuracy(**more: Any) -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    from megakit.training import ValidationMetric

    return ValidationMetric(
        MulticlassAccuracy(average="micro"), lambda batch, output: (output, batch["label"]), **more
    )


def validate(**metrics: Any) -> dict[str, Any]:
    """Logged values of a batch with two of three labels right."""
    from megakit.nemo.validation import ExactValidation

    callback, logged = ExactValidation(), dict[str, Any]()
    steps = {"validation": SimpleNamespace(loss=None)}
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu"), steps=steps)
    )
    log = lambda name, value, **_: logged.update({name: float(value)})  # noqa: E731
    module: Any = SimpleNamespace(validation_metrics=lambda: metrics, log=log)
    callback.on_validation_start(trainer, module)
    output = torch.eye(3)
    callback.update_metrics({"label": torch.tensor([0, 1, 1])}, output)
    output.zero_()  # as a loss may do
    callback.on_validation_batch_end(trainer, module, {"loss": torch.tensor(7.0)})
    callback.on_validation_epoch_end(trainer, module)
    return logged


def test_a_metric_gets_the_output_as_it_was_before_the_loss() -> None:
    assert validate(accuracy=accuracy()) == {
        "val_loss": 7,
        "val_accuracy": pytest.approx(2 / 3),
    }


def test_a_loss_that_sets_num_tokens_weighs_its_steps() -> None:
    """As docs/adapting.md says of a loss with another base class."""
    from megakit.nemo.validation import ExactValidation

    callback, logged = ExactValidation(), dict[str, float]()
    loss = SimpleNamespace()
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(
            root_device=torch.device("cpu"), steps={"validation": SimpleNamespace(loss=loss)}
        )
    )
    log = lambda name, value, **_: logged.update({name: float(value)})  # noqa: E731
    module: Any = SimpleNamespace(validation_metrics=dict, log=log)
    callback.on_validation_start(trainer, module)
    for value, loss.num_tokens in ((1.0, torch.tensor(1)), (2.0, torch.tensor(3))):
        callback.on_validation_batch_end(trainer, module, {"loss": torch.tensor(value)})
    callback.on_validation_epoch_end(trainer, module)
    assert logged == {"val_loss": 1.75}


def test_a_value_of_the_loss_and_a_metric_of_one_name_are_refused() -> None:
    """Else the metric's value would silently take the place of the loss's."""
    with pytest.raises(UserError, match="'loss': the loss also returns a value"):
        validate(loss=accuracy())


def test_whether_a_higher_value_is_better() -> None:
    """A metric says it by itself or is declared, as is the value of a loss or a callback."""
    from torchmetrics import MeanMetric

    from megakit.nemo.validation import higher_is_better
    from megakit.training import ValidationMetric

    metrics = {
        "accuracy": accuracy(),
        "inverted": accuracy(higher_is_better=False),
        "mean": ValidationMetric(MeanMetric(), lambda batch, out: (out,)),
    }
    loss = SimpleNamespace(higher_is_better={"margin"})
    module: Any = SimpleNamespace(
        validation_metrics=lambda: metrics, validation_loss_reduction=lambda: loss
    )
    trainer: Any = SimpleNamespace(callbacks=[SimpleNamespace(higher_is_better=["share"])])
    highest = {"accuracy": True, "inverted": False, "margin": True, "share": True, "loss": False}
    for name, expected in highest.items():
        assert higher_is_better(f"val_{name}", trainer, module) == expected, name
    with pytest.raises(UserError, match=r"--best-by val_mean: MeanMetric does not say"):
        higher_is_better("val_mean", trainer, module)


def test_values_of_an_earlier_validation_are_dropped() -> None:
    """Lightning keeps them until they are logged again."""
    from megakit.nemo.reporter import Reporter

    reporter: Any = Reporter(None, "pretrain", None, None)  # type: ignore[arg-type]
    logged = {"val_rare": 7.0, "val_loss": 1.0, "train_loss": 2.0}
    reporter.on_validation_start(SimpleNamespace(callback_metrics=logged), None)
    assert logged == {"train_loss": 2.0}
