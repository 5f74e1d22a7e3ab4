"""What the console says of a start, and outputs that are refused before they are written."""

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


@pytest.mark.parametrize(
    ("old", "replaced"),
    [
        (None, []),
        ('{"checkpoint": "step=10", "dataset": "digits"}', []),
        ("[1", []),
        ("[1]", []),
        (
            '{"checkpoint": "step=5\\u001b", "dataset": "mnist"}',
            [r"Replaces the predictions of step=5\x1b on mnist in {}/predict."],
        ),
    ],
)
def test_a_prediction_says_what_it_replaces(
    tmp_path: Path, old: str | None, replaced: list[str]
) -> None:
    from megakit.job.finish import say_header
    from model_predict import PREDICT, PredictOptions

    options = PredictOptions(output_dir=tmp_path)
    run = jobs.make_run(PREDICT, options, jobs.layout(), start="step=10")
    if old is not None:
        run.directory.summary.write_text(old)
    told = [line.format(tmp_path) for line in replaced]
    assert said_by(run, say_header) == ["Starting from step=10.", *told]


@pytest.mark.parametrize("resume", [None, "step=000020"])
def test_only_a_new_run_says_where_it_starts(tmp_path: Path, resume: str | None) -> None:
    """A resumed run goes on from its own checkpoint, which `begin_run` has named."""
    from megakit.job.finish import say_header
    from model_finetune import FINETUNE, FinetuneOptions

    options = FinetuneOptions(output_dir=tmp_path)
    run = jobs.make_run(FINETUNE, options, jobs.layout(), start="step=10", resume=resume)
    assert said_by(run, say_header) == ([] if resume else ["Starting from step=10."])


def said_by(run: Any, function: Any) -> list[str]:
    """The lines that a function prints for the user, without the first."""
    run.console = mock.Mock()
    function(run)
    return [call.args[0] for call in run.console.say.call_args_list][1:]
