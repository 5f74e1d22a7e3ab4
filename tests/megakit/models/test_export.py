"""Exports: what is asked for is checked first, what is written gives what the model gives."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import ExportedProgram

from megakit.models.export import main
from megakit.models.export_formats import compare
from tests.scripts import REPOSITORY, read_csv, run, run_script

Export = Callable[..., int]


@pytest.fixture(scope="module")
def checkpoint(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megakit.checkpoints.manifest import Manifest, list_files, write_manifest
    from tests.megakit.models.networks import save_checkpoint

    checkpoint = save_checkpoint(tmp_path_factory.mktemp("export"), net())
    files = list_files(checkpoint)
    write_manifest(checkpoint, Manifest("train", "Net", "noise", 7, 0.5, {"lr": 0.1}, files=files))
    return checkpoint


@pytest.fixture
def export(checkpoint: Path) -> Export:
    """The command, in this process."""

    def command(*options: Any) -> int:
        components = ("--components", "tests.megakit.models.networks")
        return main([str(checkpoint), *components, *map(str, options)])

    return command


def net(seed: int = 3) -> Any:
    from tests.megakit.models.networks import Net, NetConfig

    return Net(NetConfig(seed=seed))


def test_every_format(export: Export, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    weights, program, onnx = (tmp_path / f"net.{name}" for name in ("safetensors", "pt2", "onnx"))
    formats = ("--safetensors", weights, "--torch-export", program, "--onnx", onnx)
    assert export(*formats, "--input-shape", "6") == 0
    assert capsys.readouterr() == (f"{onnx}\n{program}\n{weights}\n", "")
    assert set(tmp_path.iterdir()) == {weights, program, onnx}

    from onnxruntime import InferenceSession
    from safetensors import safe_open

    trained = net()
    with safe_open(weights, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        told = file.metadata()
    expected = dict(trained.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert (told["model"], told["dataset"], told["step"]) == ("Net", "noise", "7")
    assert json.loads(told["run"]) == {"lr": 0.1}
    session = InferenceSession(onnx, providers=["CPUExecutionProvider"])
    for batch in (1, 9):
        x = torch.randn(batch, 6)
        loaded = torch.export.load(program).module()
        for output in (loaded(x), *map(torch.as_tensor, session.run(None, {"input": x.numpy()}))):
            torch.testing.assert_close(output, trained(x), rtol=0, atol=1e-6)


def test_a_file_that_gives_something_else_is_not_left(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(ExportedProgram, "module", lambda self: net(seed=4))
    program, weights = tmp_path / "net.pt2", tmp_path / "net.safetensors"
    formats = ("--torch-export", program, "--safetensors", weights)
    assert export(*formats, "--input-shape", "6") == 1
    out, err = capsys.readouterr()
    assert f"{program} was not written: output: the file's output differs" in err
    assert list(tmp_path.iterdir()) == [weights], "a format that fails does not stop the others"
    assert out == f"{weights}\n"


@pytest.mark.parametrize(("largest", "difference"), [(0.5, 1e-5), (40.0, 4e-4)])
def test_the_tolerance_is_a_share_of_the_largest_output(largest: float, difference: float) -> None:
    """Float32 sums of large terms differ by more; logits are often above 30."""
    outputs = torch.tensor([[largest, 0.0, -torch.inf]])
    model: Any = lambda x: outputs  # noqa: E731
    inputs: Any = ({"x": torch.zeros(2)}, {})
    compare(model, lambda x: {"output": outputs + 0.9 * difference}, *inputs)
    for wrong in (outputs + 1.1 * difference, outputs[0], outputs * torch.nan):
        with pytest.raises(ValueError, match=f"output differs by more than {difference:.1e}"):
            compare(model, lambda x, wrong=wrong: {"output": wrong}, *inputs)


def test_what_is_refused_first(
    export: Export, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    weights, program = tmp_path / "net.safetensors", ("--torch-export", tmp_path / "net.pt2")
    weights.write_text("mine")
    assert export("--safetensors", weights, "--onnx", tmp_path / "no" / "net.onnx") == 2
    assert export("--safetensors", tmp_path / "x", "--torch-export", tmp_path / "x") == 2
    assert export(*program, "--input-shape", "2,5") == 2
    assert export(*program) == 2
    told = capsys.readouterr().err
    for part in (
        "two formats with one FILE",
        f"net.onnx: there is no folder {tmp_path / 'no'}. Create it, or choose",
        f"{weights}: exists. Choose another name, or give --force.",
        "--input-shape 2,5: Net does not take such a sample",
        "--input-shape is missing; for images",
    ):
        assert part in told
    assert list(tmp_path.iterdir()) == [weights]
    assert weights.read_text() == "mine"
    assert export("--safetensors", weights, "--force") == 0
    assert weights.stat().st_size > 100


OPTIONS = ("--dataset", "digits", "--precision", "32", "--max-steps", 200, "--val-interval", 100)


def compare_with_rows(logits: Any, rows: list[dict[str, str]]) -> None:
    """Every probability as predicted, to 1e-5 of the largest logit."""
    logits = np.asarray(logits, dtype=np.float64)
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    found /= found.sum(axis=1, keepdims=True)
    expected = np.array([[float(row[f"p{k}"]) for k in range(10)] for row in rows])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5 * max(1, np.abs(logits).max())


@pytest.mark.long
def test_the_document(tmp_path: Path) -> None:
    """Its commands and programs run in their order; what they leave predicts as prediction did.

    The classifier is fine-tuned as a pipeline of two processes, and used in float32.
    """
    two = ("--devices", 2, "--pipeline-parallel", 2)
    for script, *options in (
        ("model_pretrain.py", *OPTIONS),
        ("model_finetune.py", *OPTIONS, *two),
        ("model_predict.py", *OPTIONS[:4]),
    ):
        run_script(script, "--output-dir", tmp_path / "runs", *options).output()
    text = (REPOSITORY / "docs" / "inference.md").read_text()
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert [language for language, _ in blocks].count("python") >= 3
    (tmp_path / "model_components.py").symlink_to(REPOSITORY / "model_components.py")
    for language, block in blocks:
        block = block.replace("./run setup --dev", "true")  # what runs this test was set up
        block = block.replace(".venv/bin/python", sys.executable)
        block = block.replace("read_mnist(folder, train=False)", 'read_digits("test")')
        finetune = " ".join(map(str, (sys.executable, REPOSITORY / "model_finetune.py", *OPTIONS)))
        block = block.replace("./run finetune", finetune)
        shell = ["bash", "-euc"] if language == "bash" else [sys.executable, "-c"]
        done = run(*shell, block, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
        assert done.status == 0, block + done.err
    rows = read_csv(tmp_path / "runs" / "predict" / "predictions.csv")
    found = sorted(tmp_path.glob("logits-*.npy"))
    assert [path.stem for path in found] == [
        *("logits-module", "logits-onnx", "logits-program", "logits-weights")
    ]
    for path in found:
        compare_with_rows(np.load(path), rows)
