"""The vision transformer: its parts by hand, and its three scripts as a user starts them."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from examples.vit import random_effects
from megakit.data import EpochIndex
from megakit.testing import assert_dataset_compatible_with_megatron
from mnist.files import DataOptions
from tests.scripts import accuracy, read_csv, read_json, run_python, run_script

DIGITS = ("--dataset", "digits", "--accelerator", "cpu")


@pytest.fixture(scope="module")
def vit(megatron: None) -> ModuleType:
    """`vit_components`, which can be imported once an accelerator was chosen."""
    from examples.vit import vit_components

    return vit_components


@pytest.fixture(scope="module")
def images(vit: ModuleType) -> Any:
    from mnist.files import DataOptions
    from model_components import MNISTDataModule

    data = MNISTDataModule(DataOptions.data_dir, dataset="digits")
    data.setup("fit")
    return data.val_set


# --- Losses and data ------------------------------------------------------------------------------


def test_only_hidden_pixels_count(vit: ModuleType) -> None:
    shown = torch.ones(2, 1, 28, 28, dtype=torch.bool)
    shown[:, :, :7, :14] = False  # an eighth of the pixels
    x_hat = torch.full((2, 784), 0.5)
    batch = {"data": torch.zeros(2, 1, 28, 28), "shown": shown}
    loss, reported = vit.MaskedLossReduction().forward(batch, {"x_hat": x_hat})
    assert loss.item() == reported["avg"].item() == 0.25 / 8
    x_hat[:, 28 * 7 :] = 100.0  # below the hidden ones
    assert vit.MaskedLossReduction().forward(batch, {"x_hat": x_hat})[0].item() == 0.25 / 8


@pytest.mark.parametrize("wrapper", ["MaskPatches", "ShiftImages"])
def test_datasets_keep_the_rules(vit: ModuleType, images: Any, wrapper: str) -> None:
    assert_dataset_compatible_with_megatron(getattr(random_effects, wrapper)(images))


def test_equally_many_whole_patches_are_hidden(vit: ModuleType, images: Any) -> None:
    masked = random_effects.MaskPatches(images, share=0.5)
    item = masked[EpochIndex(0, 3)]
    hidden = ~item["shown"]
    by_patch = hidden.view(4, 7, 4, 7).float().mean(dim=(1, 3))
    assert by_patch.unique().tolist() == [0, 1]
    assert by_patch.sum() == 8
    assert (item["corrupted"][hidden] == -1).all()
    assert torch.equal(item["corrupted"][~hidden], item["data"][~hidden])
    assert torch.equal(item["data"], images[3]["data"])
    of_next_epoch = ~masked[EpochIndex(1, 3)]["shown"]
    assert of_next_epoch.sum() == hidden.sum()
    assert not torch.equal(of_next_epoch, hidden)


def test_shifts_move_whole_images(vit: ModuleType, images: Any) -> None:
    shifted = random_effects.ShiftImages(images, pixels=2)
    padded = np.pad(images[5]["data"][0], 2)
    of_shift = {
        (row, column): padded[row : row + 28, column : column + 28]
        for row in range(5)
        for column in range(5)
    }
    seen = set()
    for epoch in range(200):
        item = shifted[EpochIndex(epoch, 5)]
        assert item["label"] == images[5]["label"]
        found = [by for by, data in of_shift.items() if np.array_equal(item["data"][0], data)]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) == 25  # 200 draws miss one of them in less than 1% of all seeds


def test_each_validation_hides_the_same(vit: ModuleType) -> None:
    data = vit.VitDataModule(DataOptions.data_dir, dataset="digits", masked_share=0.5)
    data.setup("fit")
    assert [data.val_set[idx]["idx"] for idx in (0, 7)] == [0, 7]
    first, again = data.val_set[7], data.val_set[7]
    assert torch.equal(first["shown"], again["shown"])
    assert "shown" in data.train_set[0]
    assert "shown" not in data.test_set[0]


# --- Models ---------------------------------------------------------------------------------------


def test_patches_row_by_row(vit: ModuleType) -> None:
    images = torch.arange(2 * 3 * 28 * 28.0).view(2, 3, 28, 28)
    patches = vit.to_patches(images, 7)
    assert patches.shape == (16, 2, 3 * 49)
    assert torch.equal(patches[5, 1], images[1, :, 7:14, 7:14].flatten())
    assert torch.equal(vit.to_images(patches, 7), images)


def test_every_patch_sees_every_other(vit: ModuleType) -> None:
    """Megatron's own layer specs are for text, where a token sees those before it alone."""
    model = vit.VitPretrainConfig().configure_model()
    images = torch.rand(1, 1, 28, 28, requires_grad=True)
    first_patch = model(images)["x_hat"].view(28, 28)[:7, :7]
    (gradient,) = torch.autograd.grad(first_patch.sum(), images)
    assert vit.to_patches(gradient, 7).abs().sum(dim=(1, 2)).gt(0).all()


# --- Scripts --------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_chain(tmp_path: Path) -> None:
    """From another folder, by path, on bundled digits."""
    common = (*DIGITS, "--output-dir", tmp_path)
    short = ("--val-interval", 100, "--save-interval", 100, "--global-batch-size", 64)
    for script, steps in (("model_pretrain.py", 100), ("model_finetune.py", 200)):
        run_script(f"examples/vit/{script}", *common, *short, "--max-steps", steps).output()
    loss = read_json(tmp_path / "pretrain" / "summary.json")["train_loss"]
    assert loss["last"] < 0.6 * loss["first"]
    result = run_script("examples/vit/model_predict.py", *common).output()
    predictions = Path(result.strip())
    assert [int(row["idx"]) for row in read_csv(predictions)] == list(range(300))
    assert accuracy(predictions) > 0.7
    check_export(read_json(tmp_path / "finetune" / "summary.json")["checkpoint"])


def check_export(checkpoint: str) -> None:
    """A program of torch.export computes what the plain module computes, for any batch."""
    code = """
import sys, torch
from megakit.runtime import use_accelerator
use_accelerator("cpu")
import examples.vit.vit_components
from megakit.models import load_for_inference
model, images = load_for_inference(sys.argv[1]), torch.rand(3, 1, 28, 28)
shapes = ({0: torch.export.Dim.DYNAMIC},)
program = torch.export.export(model, (images[:2],), dynamic_shapes=shapes).module()
torch.testing.assert_close(program(images), model(images), rtol=0, atol=1e-5)
torch.testing.assert_close(program(images[:1]), model(images[:1]), rtol=0, atol=1e-5)
"""
    run_python("-c", code, checkpoint).output()
