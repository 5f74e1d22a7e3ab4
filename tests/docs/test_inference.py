"""The program of docs/inference.md runs, and what it exports predicts as prediction did."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.scripts import REPOSITORY, read_csv, run, run_script

DIGITS = ("--dataset", "digits", "--precision", "32")
SAVED = '\nlogits["module"] = model(images).numpy()\nnp.savez("logits.npz", **logits)\n'


@pytest.mark.long
def test_the_program(tmp_path: Path) -> None:
    """The classifier is fine-tuned as a pipeline of two processes, and used in float32."""
    common = (*DIGITS, "--output-dir", tmp_path / "runs")
    two = ("--devices", 2, "--pipeline-parallel", 2)
    training = ("--checkpoint", "none", "--max-steps", 100)
    run_script("model_finetune.py", *common, *training, *two).output()
    run_script("model_predict.py", *common).output()
    page = (REPOSITORY / "docs" / "inference.md").read_text().partition("## Many samples")[0]
    page = page.replace("read_mnist(folder, train=False)", 'read_digits("test")')
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    program += SAVED
    done = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(REPOSITORY))
    assert done.status == 0, done.err
    rows = read_csv(tmp_path / "runs" / "predict" / "predictions.csv")
    expected = np.array([[float(row[f"p{k}"]) for k in range(10)] for row in rows])
    found = np.load(tmp_path / "logits.npz")
    assert {*found} == {"module", "program", "onnx", "weights"}
    for logits in map(np.float64, found.values()):
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        assert shares.shape == expected.shape
        assert np.abs(shares - expected).max() < 1e-5 * max(1, np.abs(logits).max())
    imported = ("--checkpoint", tmp_path / "imported", "--output-dir", tmp_path / "runs/imported")
    run_script("model_predict.py", *DIGITS, *imported).output()
