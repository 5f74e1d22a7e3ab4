"""Exporting: what is asked for is checked first, what is written gives what the model gives."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megakit.models.export import main
from megakit.models.exporters import ExportError, compare
from megakit.models.model_inputs import sample_input
from mnist import files as mnist_files
from tests.scripts import REPOSITORY, read_csv, run, run_script


@pytest.fixture(scope="module")
def checkpoint(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megakit.checkpoints.manifest import Manifest, list_files, write_manifest
    from tests.megakit.models.networks import Net, NetConfig, save_checkpoint

    folder = save_checkpoint(tmp_path_factory.mktemp("export") / "net", Net(NetConfig(seed=3)))
    manifest = Manifest("train", "Net", "noise", 7, 0.5, {"lr": 0.1}, files=list_files(folder))
    write_manifest(folder, manifest)
    return folder


def net(seed: int = 3) -> Any:
    from tests.megakit.models.networks import Net, NetConfig

    return Net(NetConfig(seed=seed))


@pytest.fixture
def export(checkpoint: Path) -> Any:
    """The command, in this process."""
    command = [str(checkpoint), "--components", "tests.megakit.models.networks"]
    return lambda *options: main([*command, *map(str, options)])


def test_every_format(export: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    weights, program, onnx = (tmp_path / f"net.{name}" for name in ("safetensors", "pt2", "onnx"))
    formats = ("--safetensors", weights, "--torch-export", program, "--onnx", onnx)
    assert export(*formats, "--input-shape", "6") == 0
    assert capsys.readouterr().out == f"{onnx}\n{program}\n{weights}\n"
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

    x = torch.randn(9, 6)
    loaded = torch.export.load(program).module()
    torch.testing.assert_close(loaded(x), trained(x), rtol=0, atol=1e-6)

    session = InferenceSession(onnx, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(["output"], {"input": x.numpy()})
    torch.testing.assert_close(torch.as_tensor(outputs), trained(x), rtol=0, atol=1e-6)


def test_what_exists_stays_unless_forced(
    export: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    weights = tmp_path / "net.safetensors"
    weights.write_text("mine")
    assert export("--safetensors", weights) == 2
    assert "exists. Choose another name, or give --force" in capsys.readouterr().err
    assert weights.read_text() == "mine"
    assert export("--safetensors", weights, "--force") == 0
    assert weights.stat().st_size > 100


def test_a_file_that_gives_something_else_is_not_left(
    export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from torch.export import ExportedProgram

    monkeypatch.setattr(ExportedProgram, "module", lambda self: net(seed=4))
    program, weights = tmp_path / "net.pt2", tmp_path / "net.safetensors"
    formats = ("--torch-export", program, "--safetensors", weights)
    assert export(*formats, "--input-shape", "6") == 1
    out, err = capsys.readouterr()
    assert f"{program} was not written: output: the exported model's output differs from" in err
    assert list(tmp_path.iterdir()) == [weights], "a format that fails does not stop the others"
    assert out == f"{weights}\n"


@pytest.mark.parametrize(("largest", "difference"), [(0.5, 1e-5), (40.0, 4e-4)])
def test_the_tolerance_is_a_share_of_the_largest_output(largest: float, difference: float) -> None:
    """Float32 sums of large terms differ by more; logits are often above 30."""
    outputs, inputs = torch.tensor([[largest, 0.0]]), sample_input((1,))

    class Constant(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return outputs

    compare(Constant(), lambda x: {"output": outputs + 0.9 * difference}, inputs)
    with pytest.raises(ExportError, match=f"{1.1 * difference:.1e}. For outputs of up to"):
        compare(Constant(), lambda x: {"output": outputs + 1.1 * difference}, inputs)


def test_a_sample_that_the_model_does_not_take(
    export: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert export("--torch-export", tmp_path / "net.pt2", "--input-shape", "2,5") == 2
    assert "--input-shape 2,5: Net does not take such a sample" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_all_problems_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    components = ("--components", "no.such")
    assert main([str(tmp_path / "nowhere"), *components]) == 2
    told = capsys.readouterr().err
    for problem in (
        "nowhere: there is no such checkpoint",
        "--components no.such: there is no such module in",
        "nothing to write",
    ):
        assert problem in told
    assert main([str(tmp_path), "--safetensors", str(tmp_path / "no" / "file")]) == 2
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err


def test_packages_that_are_not_installed(
    export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    assert export("--onnx", tmp_path / "net.onnx", "--input-shape", "6") == 2
    told = capsys.readouterr().err
    assert "--onnx needs onnxscript, onnxruntime: ./run setup --dev installs" in told


# ---- The tutorial's own model ------------------------------------------------------------------


OPTIONS = ("--dataset", "digits", "--precision", "32", "--max-steps", 200, "--val-interval", 100)


def compare_with_rows(logits: Any, rows: list[dict[str, str]]) -> None:
    """Every class as predicted, unless two tie; every probability to 1e-5 of the largest logit."""
    logits = np.asarray(logits, dtype=np.float64)
    tolerance = 1e-5 * max(1, np.abs(logits).max())
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    found /= found.sum(axis=1, keepdims=True)
    expected = np.array([[float(row[f"p{k}"]) for k in range(10)] for row in rows])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < tolerance
    two_best = np.sort(found, axis=1)[:, -2:]
    is_clear = two_best[:, 1] - two_best[:, 0] > tolerance
    assert is_clear.mean() > 0.9
    predicted = np.array([int(row["prediction"]) for row in rows])
    assert (found.argmax(axis=1) == predicted)[is_clear].all()
    with pytest.raises(AssertionError):  # else the checks above could not fail
        assert (found.argmax(axis=1) == np.roll(predicted, 1)).all()


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
    images, _ = mnist_files.read_digits("test")
    np.save(tmp_path / "images.npy", (images[:, None] / 255).astype(np.float32))
    for language, block in blocks:
        block = block.replace("./run setup --dev", "true")  # what runs this test was set up
        block = block.replace(".venv/bin/python", sys.executable)
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
