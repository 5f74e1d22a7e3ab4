"""Exporting models of tokens and of several inputs, as their configs describe the inputs."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megakit.models.export import main
from megakit.models.exporters import ExportError, compare, export_onnx, export_program
from megakit.models.model_inputs import ModelInput, dynamic_sizes, examples

TOKENS = {"tokens": ModelInput({"batch": None, "sequence": (1, 24)}, dtype="int64", below=32)}


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


@pytest.mark.parametrize("write", [export_onnx, export_program])
def test_several_inputs(write: Any, tmp_path: Path) -> None:
    import onnxruntime

    model, path = Several(), tmp_path / "model"
    write(model, path, inputs=SEVERAL)
    for batch, time in ((1, 2), (4, 4), (6, 40)):
        given = examples(SEVERAL, {"batch": batch, "time": time})
        expected = model(*given)
        if write is export_onnx:
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            arrays = {name: tensor.numpy() for name, tensor in zip(SEVERAL, given, strict=True)}
            names = ["rows", "total"]
            found = dict(zip(names, map(torch.as_tensor, session.run(names, arrays)), strict=True))
        else:
            with path.open("rb") as file:
                found = torch.export.load(file).module()(*given)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor)


def test_examples_follow_their_description() -> None:
    assert dynamic_sizes(SEVERAL) == {"batch": (1, None), "time": (2, 40)}
    sizes = {"batch": 50, "time": 40}
    x, keep, row, step = examples(SEVERAL, sizes)
    assert (x.shape, x.dtype) == ((50, 40, 3), torch.float32)
    assert (keep.shape, keep.dtype) == ((50, 40), torch.bool)
    assert (row.shape, row.dtype) == ((50,), torch.int32)
    assert (step.shape, step.dtype) == ((), torch.int64)
    assert row.unique().tolist() == [0, 1, 2]
    assert 0 < x.min() < 0.1 < 0.9 < x.max() < 1
    assert all(map(torch.equal, examples(SEVERAL, sizes), examples(SEVERAL, sizes)))


@pytest.mark.parametrize(("sizes", "is_seen"), [((1, 24), True), ((1, 5), False)])
def test_a_file_that_is_right_for_short_sequences_only(
    sizes: tuple[int, int], is_seen: bool
) -> None:
    """A traced length is such a fault: the file is compared at the longest sequence."""
    model = nn.Embedding(32, 4)
    inputs = {"tokens": ModelInput({"batch": None, "sequence": sizes}, dtype="int64", below=32)}

    def exported(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"output": model(tokens) * (torch.arange(tokens.shape[1]) < 5)[:, None]}

    if not is_seen:
        return compare(model, exported, inputs)
    with pytest.raises(ExportError, match=r"output: the exported model's output differs"):
        compare(model, exported, inputs)
    return None


def test_another_shape() -> None:
    def exported(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"output": torch.ones(1)}

    ones = nn.Module()
    ones.forward = lambda tokens: torch.ones(tokens.shape)
    with pytest.raises(ExportError, match=r"has the shape \(1,\), the model's \(1, 1\)"):
        compare(ones, exported, TOKENS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": {"batch": 0}}, "batch 0: give a number above 0, "),
        ({"sizes": {"batch": (0, 5)}}, r"batch \(0, 5\): give"),
        ({"sizes": {"batch": (5, 5)}}, r"batch \(5, 5\): give"),
        ({"sizes": {"batch size": 3}}, "'batch size': use a valid Python identifier"),
        ({"sizes": {}, "dtype": "float16"}, "'float16': give one of float32, int64"),
        ({"sizes": {}, "dtype": "int64"}, "int64 without below: give the number"),
    ],
)
def test_descriptions_that_are_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelInput(**arguments)


def test_the_config_describes_the_input_and_the_option_does_too(
    export: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert export("--onnx", tmp_path / "model.onnx", "--input-shape", "24") == 2
    told = "--input-shape: LanguageConfig.export_inputs describes the input. Leave out this option."
    assert capsys.readouterr().err == f"export: {told}\n"


def test_nothing_describes_the_input(
    export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from tests.megakit.models.language import LanguageConfig

    monkeypatch.delattr(LanguageConfig, "export_inputs")
    hint = "For another input than one float32 tensor, define LanguageConfig.export_inputs."
    assert export("--onnx", tmp_path / "model.onnx") == 2
    told = capsys.readouterr().err
    assert told.startswith("export: --input-shape is missing")
    assert told.endswith(f"{hint}\n")
    assert export("--onnx", tmp_path / "model.onnx", "--input-shape", "24") == 2
    told = capsys.readouterr().err
    assert "--input-shape 24: LanguageModel does not take such a sample (RuntimeError: " in told
    assert told.endswith(f"{hint}\n")
    assert export("--safetensors", tmp_path / "model.safetensors") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


BATCH = {"batch": None}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([TOKENS], "must return a dict of ModelInput by name."),
        ({}, "describes nothing. Describe the first parameters of LanguageModel.forward, in order"),
        ({"ids": TOKENS["tokens"]}, "describes ids. Describe the first parameters of Lang"),
        (
            {**TOKENS, "labels": ModelInput({"batch": 3}, dtype="int64", below=3)},
            "batch is None and 3. Dimensions of the same name have the same size",
        ),
        (
            {"tokens": ModelInput({**BATCH, "sequence": (1, 25)}, dtype="int64", below=32)},
            None,  # Megatron's position embedding has 24 rows
        ),
        (
            {"tokens": ModelInput({**BATCH, "sequence": (30, 50)}, dtype="int64", below=32)},
            "does not take such a sample (IndexError: index out of range in self, at language.py:",
        ),
    ],
)
def test_a_hook_that_describes_something_else(
    inputs: Any,
    message: str | None,
    export: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from tests.megakit.models.language import LanguageConfig

    monkeypatch.setattr(LanguageConfig, "export_inputs", lambda self: inputs)
    program = tmp_path / "model.pt2"
    status = export("--torch-export", program)
    told = capsys.readouterr().err
    if message is None:
        assert status == 1
        assert told.startswith(f"export: {program} was not written: IndexError")
    else:
        assert status == 2
        assert told.startswith("export: LanguageConfig.export_inputs: ")
        assert message in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_hook_with_an_impossible_size(
    export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from tests.megakit.models.language import LanguageConfig

    monkeypatch.setattr(
        LanguageConfig, "export_inputs", lambda self: {"tokens": ModelInput({"batch": (4, 2)})}
    )
    assert export("--onnx", tmp_path / "model.onnx") == 2
    told = capsys.readouterr().err
    assert told.startswith("export: LanguageConfig.export_inputs: batch (4, 2): give a number")


def test_models_that_the_exporters_cannot_convert(
    export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from tests.megakit.models.language import LanguageModel

    def forward(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.embedding.word_embeddings(tokens)
        return logits if logits.sum() > 0 else -logits

    begin = forward.__code__.co_firstlineno
    monkeypatch.setattr(LanguageModel, "forward", forward)
    onnx, program, weights = (tmp_path / name for name in ("a.onnx", "a.pt2", "a.safetensors"))
    formats = ("--onnx", onnx, "--torch-export", program, "--safetensors", weights)
    assert export(*formats) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 2, err
    first, second = err.splitlines()
    for line, path in ((first, onnx), (second, program)):
        assert line.startswith(f"export: {path} was not written: "), line
        assert "data-dependent expression" in line, line
        assert line.endswith(f", at {Path(__file__).name}:{begin + 2}"), line
    assert out == f"{weights}\n"
    assert list(tmp_path.iterdir()) == [weights]


def test_outputs_that_are_no_tensors(
    export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from tests.megakit.models.language import LanguageModel

    monkeypatch.setattr(LanguageModel, "forward", lambda self, tokens: {"loss": 3.0})
    assert export("--onnx", tmp_path / "model.onnx") == 1
    told = capsys.readouterr().err
    assert "the model's loss (float) is not a tensor. Return tensors from its forward." in told
