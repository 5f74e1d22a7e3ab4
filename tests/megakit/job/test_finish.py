"""predictions.csv of a classifier and of other models, and the outputs that are refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megakit.errors import UserError
from tests.parallel import jobs

pytestmark = pytest.mark.usefixtures("megatron")


def finish(folder: Path, outputs: Any, **options: Any) -> Path:
    """Finishes a prediction with these outputs."""
    from megakit.job.finish import finish_prediction
    from megakit.training import PredictionWriter
    from model_predict import PREDICT, PredictOptions

    writer = PredictionWriter(folder / "parts")
    writer.seconds = 2.0
    run = jobs.make_run(PREDICT, PredictOptions(output_dir=folder), jobs.layout(), start="step=10")
    data = mock.Mock()
    data.predict_dataloader().dataset = range(len(outputs.idx))
    trainer: Any = SimpleNamespace(callbacks=[writer], datamodule=data)
    stored = mock.MagicMock()
    stored.__len__.return_value, stored.__iter__.return_value = len(outputs.idx), iter([outputs])
    with mock.patch.object(PredictionWriter, "outputs", return_value=stored):
        return finish_prediction(run, trainer, **options)


def outputs(**changed: Any) -> Any:
    from megakit.training import Outputs

    ones = {"output": np.ones((2, 10), np.float32), "latent": np.ones((2, 3), np.float32)}
    return Outputs(**{"idx": np.arange(2), "label": np.arange(2), **ones, **changed})


class TestRefused:
    @pytest.mark.parametrize(("name", "number"), [("output", np.nan), ("latent", np.inf)])
    def test_no_numbers(self, tmp_path: Path, name: str, number: float) -> None:
        spoilt = np.array([[1.0, 2.0, 3.0], [4.0, number, 6.0]], np.float32)
        with pytest.raises(UserError, match=r"^step=10: the model's outputs are NaN or infinite"):
            finish(tmp_path, outputs(**{name: spoilt}))

    @pytest.mark.parametrize("shape", [(2, 1), (2, 5, 3), (2,)])
    def test_an_output_of_no_classifier(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        shown = str(("B", *shape[1:])).replace("'", "").replace(",)", ")")
        with pytest.raises(UserError, match=r"at least two classes.*rows=") as caught:
            finish(tmp_path, outputs(output=np.ones(shape, np.float32)))
        assert f"'output' of shape {shown}" in str(caught.value)
        assert list((tmp_path / "predict").glob("*.csv")) == []

    def test_a_classifier_without_labels(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no 'label'.*rows="):
            finish(tmp_path, outputs(label=None))

    def test_a_column_of_another_shape(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"'value' .* the shape \(2, 10\) for 2 samples"):
            finish(tmp_path, outputs(), rows=lambda block: {"value": block.output})


def test_a_model_that_is_no_classifier(tmp_path: Path) -> None:
    found = outputs(output=np.array([[0.1], [-1e-05]], np.float32), label=None, latent=None)
    path = finish(
        tmp_path,
        found,
        sources=["first", "second, quoted"],
        rows=lambda block: {"value": block.output[:, 0], "is_high": block.output[:, 0] > 0},
    )
    assert path.read_text() == (
        'idx,source,value,is_high\n0,first,0.1,True\n1,"second, quoted",-1e-05,False\n'
    )
    summary = json.loads((tmp_path / "predict" / "summary.json").read_text())
    assert (summary["num_samples"], summary["seconds"]) == (2, 2.0)
    assert summary["samples_per_second"] == 1.0
    assert summary["accuracy"] is summary["cross_entropy"] is None


def test_a_trainer_without_the_run_s_callbacks(tmp_path: Path) -> None:
    from megakit.job.finish import finish_prediction

    trainer: Any = SimpleNamespace(callbacks=[])
    with pytest.raises(UserError, match=r"no PredictionWriter\. Pass run\.callbacks\(\)"):
        finish_prediction(SimpleNamespace(path=tmp_path), trainer)
