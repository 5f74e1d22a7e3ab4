"""The models' sizes as options: their one default, wrong use, and a chain with other sizes."""

from pathlib import Path

import pytest

from megakit.checkpoints.context import read_model_settings
from mnist.sizes import CheckpointSizeOptions, SizeOptions
from model_finetune import FinetuneOptions
from model_pretrain import PretrainOptions
from tests.refusals import Refusals
from tests.scripts import read_csv, read_json, run_script
from tests.single_process import single_process

DIGITS = ("--dataset", "digits", "--accelerator", "cpu")


def test_options_and_configs_have_one_default() -> None:
    with single_process():
        from model_components import ExampleFineTuneConfig, PretrainConfig

        configs = PretrainConfig(), ExampleFineTuneConfig()
    pretrain, finetune = PretrainOptions(), FinetuneOptions()
    for name in CheckpointSizeOptions.model_sizes:
        default = getattr(SizeOptions(), name)
        assert {getattr(config, name) for config in configs} == {default}
        assert getattr(pretrain, name) == finetune.size(name) == default
        assert getattr(finetune, name) is None
        assert name in PretrainOptions().identity()
        assert name in FinetuneOptions().identity()
    assert FinetuneOptions(hidden_size=7).size("hidden_size") == 7


def test_sizes_out_of_range(refused: Refusals) -> None:
    for script in ("model_pretrain.py", "model_finetune.py"):
        start = ("--checkpoint", "none") if script == "model_finetune.py" else ()
        hidden, latent = refused.problems(script, *start, "--hidden-size", 0, "--latent-size", -1)
        assert hidden == "--hidden-size 0: has to be at least 1."
        assert latent == "--latent-size -1: has to be at least 1."


@pytest.mark.parametrize("script", ["model_pretrain.py", "model_finetune.py"])
def test_a_width_that_cannot_be_divided(refused: Refusals, script: str) -> None:
    start = ("--checkpoint", "none") if script == "model_finetune.py" else ()
    layout = ("--devices", 3, "--tensor-parallel", 3, "--global-batch-size", 3)
    message = "--tensor-parallel 3: has to divide the width of the split layers, {}. Try 2."
    assert refused.problem(script, *start, *layout, "--hidden-size", 32) == message.format(32)
    default = refused.problem(script, *start, *layout)
    assert default == message.format(SizeOptions.hidden_size)


def check_chain(runs: Path, latent_size: int) -> None:
    """Trains and predicts at other sizes than the default ones, and tries wrong ones."""
    common = (*DIGITS, "--output-dir", runs)
    sizes = ("--hidden-size", 12, "--latent-size", latent_size)
    short = ("--max-steps", 30, "--val-interval", 30)
    first = run_script("model_pretrain.py", *common, *short, *sizes)
    assert first.status == 0, first.err
    cut = ("--devices", 5, "--tensor-parallel", 5)
    refused = run_script("model_finetune.py", *common, *short, *cut, "--global-batch-size", 5)
    assert (refused.status, "the width of the split layers, 12. Try 4." in refused.err) == (2, True)
    second = run_script("model_finetune.py", *common, *short)
    assert second.status == 0, second.err
    for path in (first.out, second.out):
        settings = read_model_settings(Path(path.strip()))
        assert (settings["hidden_size"], settings["latent_size"]) == (12, latent_size)
    other = run_script("model_finetune.py", *common, *short, "--hidden-size", 64)
    assert other.status == 2
    assert f"--hidden-size 64: the model of {first.out.strip()} has 12," in other.err
    refused = run_script("model_predict.py", *common, *cut)
    assert (refused.status, "the width of the split layers, 12. Try 4." in refused.err) == (2, True)
    (runs / "predict").mkdir(exist_ok=True)
    (runs / "predict" / "latent_space.png").write_text("of an earlier prediction")
    third = run_script("model_predict.py", *common)
    assert third.status == 0, third.err
    assert len(read_csv(runs / "predict" / "predictions.csv")) == 300
    assert read_json(runs / "predict" / "summary.json")["num_samples"] == 300
    names = {path.name for path in (runs / "predict").iterdir()}
    assert {"report.html", "confusion_matrix.png"} <= names
    assert ("latent_space.png" in names) == (latent_size > 1)  # a picture takes two dimensions


@pytest.mark.long
def test_a_chain_with_other_sizes(tmp_path: Path) -> None:
    check_chain(tmp_path, 2)


@pytest.mark.long
@pytest.mark.parametrize("latent_size", [1, 5])
def test_latent_spaces_that_no_picture_shows_whole(tmp_path: Path, latent_size: int) -> None:
    check_chain(tmp_path, latent_size)
