"""Outputs of a prediction that are refused before predictions.csv is written."""

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


SPOILT = np.array([[1.0, 2.0, 3.0], [4.0, np.nan, 6.0]], np.float32)


@pytest.mark.parametrize(
    ("changed", "options", "told"),
    [
        ({"latent": SPOILT}, {}, r"^step=10: the model's outputs are NaN or infinite"),
        ({"output": np.ones((2, 5, 3), np.float32)}, {}, r"shape \(B, 5, 3\).* two classes.*rows="),
        ({"label": None}, {}, r"no 'label'.*rows="),
        (
            *({}, {"rows": lambda block: {"value": block.output}}),
            r"'value' .* the shape \(2, 10\) for 2 samples",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changed: Any, options: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        finish(tmp_path, outputs(**changed), **options)
    assert list((tmp_path / "predict").glob("*.csv")) == []
