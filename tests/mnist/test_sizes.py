"""The models' sizes as options: their one default, and a chain with other sizes."""

from dataclasses import fields
from pathlib import Path

import pytest

from megakit.checkpoints.context import read_model_settings
from mnist.sizes import SizeOptions
from model_finetune import FinetuneOptions
from model_pretrain import PretrainOptions
from tests.scripts import read_csv, read_json, run_script
from tests.single_process import single_process

DIGITS = ("--dataset", "digits", "--accelerator", "cpu")


def test_options_and_configs_have_one_default() -> None:
    with single_process():
        from model_components import ExampleFineTuneConfig, PretrainConfig

        configs = PretrainConfig(), ExampleFineTuneConfig()
    pretrain, finetune = PretrainOptions(), FinetuneOptions()
    for name in (field.name for field in fields(SizeOptions)):
        default = getattr(SizeOptions(), name)
        assert {getattr(config, name) for config in configs} == {default}
        assert getattr(pretrain, name) == default
        assert getattr(finetune, name) is None
        assert name in PretrainOptions().identity()
        assert name in FinetuneOptions().identity()


@pytest.mark.long
def test_a_chain_with_other_sizes(tmp_path: Path) -> None:
    """With a latent space of one dimension, which no picture shows."""
    common = (*DIGITS, "--output-dir", tmp_path)
    sizes = ("--hidden-size", 12, "--latent-size", 1)
    short = ("--max-steps", 30, "--val-interval", 30)
    first = run_script("model_pretrain.py", *common, *short, *sizes)
    assert first.status == 0, first.err
    second = run_script("model_finetune.py", *common, *short)
    assert second.status == 0, second.err
    for path in (first.out, second.out):
        settings = read_model_settings(Path(path.strip()))
        assert (settings["hidden_size"], settings["latent_size"]) == (12, 1)
    other = run_script("model_finetune.py", *common, *short, "--hidden-size", 64)
    assert other.status == 2
    assert f"--hidden-size 64: the model of {first.out.strip()} has 12," in other.err
    (tmp_path / "predict").mkdir(exist_ok=True)
    (tmp_path / "predict" / "latent_space.png").write_text("of an earlier prediction")
    third = run_script("model_predict.py", *common)
    assert third.status == 0, third.err
    assert len(read_csv(tmp_path / "predict" / "predictions.csv")) == 300
    assert read_json(tmp_path / "predict" / "summary.json")["num_samples"] == 300
    names = {path.name for path in (tmp_path / "predict").iterdir()}
    assert {"report.html", "confusion_matrix.png"} <= names
    assert "latent_space.png" not in names
