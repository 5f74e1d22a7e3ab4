"""A classifier that is trained for a moment in plain PyTorch, and saved as a run would save it."""

from pathlib import Path

import numpy as np
import pytest

from megakit.checkpoints.manifest import read_manifest
from mnist import files as mnist_files
from mnist.results import show_results
from tests.mnist.report.pages import Trained, predict, save


@pytest.fixture(scope="session")
def trained(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    import torch

    from model_components import ExampleFineTuneConfig, PretrainConfig

    runs = tmp_path_factory.mktemp("report") / "runs"
    autoencoder = PretrainConfig(seed=1).configure_model()
    pretrained = save(runs / "pretrain.1", autoencoder, "pretrain", None)
    model = ExampleFineTuneConfig(seed=1).configure_model()
    images, labels = map(torch.from_numpy, mnist_files.read_digits("train"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(150):
        batch = torch.arange(64 * step, 64 * (step + 1)) % len(images)
        optimizer.zero_grad()
        logits = model(images[batch].unsqueeze(1).float() / 255)
        torch.nn.functional.cross_entropy(logits, labels[batch].long()).backward()
        optimizer.step()
    start = read_manifest(pretrained).digest
    classifier = save(runs / "finetune", model, "finetune", start)

    test_images, test_labels = mnist_files.read_digits("test")
    predictions = predict(model, test_images, test_labels.astype(np.int64))
    return Trained(runs, pretrained, classifier, test_images, predictions, model, autoencoder)


@pytest.fixture(scope="session")
def page(trained: Trained) -> Path:
    """The page, and the pictures beside it, as the prediction writes them."""
    show_results(
        trained.runs,
        trained.predictions,
        images=trained.images,
        sources=None,
        checkpoint=trained.classifier,
        dataset="digits",
    )
    return trained.runs / "report.html"
