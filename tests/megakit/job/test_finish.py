"""What a prediction writes, and outputs that are refused before they are written."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megakit.errors import UserError
from tests.parallel import jobs
from tests.scripts import REPOSITORY, read_csv, read_json

pytestmark = pytest.mark.usefixtures("megatron")


def finish(folder: Path, outputs: Any, precision: str = "auto", **options: Any) -> list[Any]:
    """Finishes a prediction with these outputs; returns lines and rows of the console."""
    from megakit.job.finish import finish_prediction
    from model_predict import PREDICT, PredictOptions

    chosen = PredictOptions(output_dir=folder, precision=precision)  # type: ignore[arg-type]
    run = jobs.make_run(PREDICT, chosen, jobs.layout(), start="step=10")
    lines: list[Any] = []
    show = {"say": lines.append, "table": lambda rows: lines.extend(rows.items())}
    run.console = mock.Mock(**show)
    finish_prediction(run, mock.Mock(join=lambda: outputs), 2, 2.0, **options)
    return lines


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
            *({}, {"rows": lambda found: {"value": found.output}}),
            r"'value' .* the shape \(2, 10\) for 2 samples",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changed: Any, options: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        finish(tmp_path, outputs(**changed), **options)
    assert list((tmp_path / "predict").glob("*.csv")) == []


def test_what_shows_a_classifier(tmp_path: Path) -> None:
    """It gets the predictions when the files are written; its lines follow the scores."""

    def show(folder: Path, predictions: Any) -> dict[str, str]:
        assert read_json(folder / "summary.json")["accuracy"] == 0.5
        assert len(read_csv(folder / "predictions.csv")) == len(predictions.latent)
        return {"wrong": str(len(predictions.mistakes()))}

    told = finish(tmp_path, outputs(), show=show)
    lines = [("accuracy", "50.00%"), ("cross entropy", "2.3026"), ("wrong", "1")]
    assert told[:4] == ["Samples predicted: 2.", *lines]


def prices() -> tuple[Any, dict[str, Any]]:
    """The outputs of a regression, and the functions of the page that write them."""
    page = (REPOSITORY / "docs" / "inference.md").read_text()
    (block,) = re.findall(r"^```python\n([^`]*^def scores\([^`]*)^```$", page, re.MULTILINE)
    names: dict[str, Any] = {}
    exec(block, names)
    target = np.array([0, 2], np.float32)
    output = np.stack([target + 0.5, target], axis=1)
    functions = {name: names[name] for name in ("rows", "scores")}
    return outputs(output=output, label=target), functions


def test_scores_of_a_regression(tmp_path: Path) -> None:
    """bfloat16 is mentioned, since a rounded price is another price; a class is seldom another."""
    found, functions = prices()
    told = finish(tmp_path, found, "32", **functions)
    rows = read_csv(tmp_path / "predict" / "predictions.csv")
    assert [row["price"] for row in rows] == ["0.5", "2.5"]
    summary = read_json(tmp_path / "predict" / "summary.json")
    assert (summary["num_samples"], summary["accuracy"]) == (2, None)
    assert (summary["r2"], summary["mean_absolute_error"]) == (0.75, 0.5)
    assert told[1:3] == [("r2", "0.7500"), ("mean absolute error", "0.5000")]
    rounded = "bfloat16 rounds outputs by up to 0.4%. --precision 32 gives float32."
    assert rounded not in told
    assert rounded in finish(tmp_path, found, **functions)
    assert rounded not in finish(tmp_path, outputs())


def test_a_score_has_a_name_of_its_own(tmp_path: Path) -> None:
    found, functions = prices()
    functions["scores"] = lambda _: {"predictions": 1, "num_samples": 1}
    told = r"^scores returned num_samples, predictions, which megakit writes itself\."
    with pytest.raises(UserError, match=told):
        finish(tmp_path, found, **functions)


def test_each_sample_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="every sample exactly once"):
        finish(tmp_path, outputs(idx=np.array([0, 0])))
