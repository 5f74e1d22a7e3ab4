"""Exporting models of tokens and of several inputs, as their configs describe the inputs."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megakit.models.export import main
from megakit.models.exporters import export_program
from megakit.models.model_inputs import ModelInput, examples


@pytest.fixture(scope="module")
def checkpoint(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.megakit.models.language import LanguageConfig, LanguageModel
    from tests.megakit.models.networks import save_checkpoint

    model = LanguageModel(LanguageConfig(seed=3))
    return save_checkpoint(tmp_path_factory.mktemp("export") / "language", model)


@pytest.fixture
def export(checkpoint: Path) -> Any:
    """The command, in this process."""
    command = [str(checkpoint), "--components", "tests.megakit.models.language"]
    return lambda *options: main([*command, *map(str, options)])


@pytest.mark.long
def test_a_language_model(
    export: Any, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from onnxruntime import InferenceSession

    from megakit.models import load_for_inference

    program, onnx = tmp_path / "model.pt2", tmp_path / "model.onnx"
    assert export("--torch-export", program, "--onnx", onnx) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (f"{onnx}\n{program}\n", "")

    plain = load_for_inference(checkpoint)
    loaded = torch.export.load(program).module()
    session = InferenceSession(onnx, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape) == (
        *("tokens", "tensor(int64)"),
        ["batch", "sequence"],
    )
    for batch, length in itertools.product((1, 2, 9), (1, 2, 17, 24)):
        tokens = torch.randint(32, (batch, length))
        expected = plain(tokens)
        assert expected.shape == (batch, length, 32)
        (found,) = session.run(["output"], {"tokens": tokens.numpy()})
        torch.testing.assert_close(torch.as_tensor(found), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(loaded(tokens), expected, rtol=0, atol=1e-5)


class Several(nn.Module):
    """Inputs of every type; two of them share both dimensions, and one has no batch."""

    def forward(
        self, x: torch.Tensor, keep: torch.Tensor, row: torch.Tensor, step: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        sums = (x * keep[..., None]).sum(dim=1)
        return {"rows": sums.gather(1, row[:, None].long())[:, 0], "total": sums.sum(1) * step}


SEVERAL = {
    "x": ModelInput({"batch": None, "time": (2, 40), "width": 3}),
    "keep": ModelInput({"batch": None, "time": (2, 40)}, dtype="bool"),
    "row": ModelInput({"batch": None}, dtype="int32", below=3),
    "step": ModelInput({}, dtype="int64", below=9),
}


def test_several_inputs(tmp_path: Path) -> None:
    model, path = Several(), tmp_path / "model"
    export_program(model, path, inputs=SEVERAL)
    with path.open("rb") as file:
        loaded = torch.export.load(file).module()
    for batch, time in ((1, 2), (4, 4), (6, 40)):
        given = examples(SEVERAL, {"batch": batch, "time": time})
        torch.testing.assert_close(loaded(*given), model(*given))


def test_nothing_describes_the_input(
    export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from tests.megakit.models.language import LanguageConfig

    monkeypatch.delattr(LanguageConfig, "export_inputs")
    assert export("--onnx", tmp_path / "model.onnx") == 2
    told = capsys.readouterr().err
    assert told.startswith("export: --input-shape is missing")
    hint = "For another input than one float32 tensor, define LanguageConfig.export_inputs."
    assert told.endswith(f"{hint}\n")
    assert list(tmp_path.iterdir()) == []
