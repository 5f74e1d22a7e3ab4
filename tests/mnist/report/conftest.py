"""A classifier that is trained for a moment in plain PyTorch, and saved as a run would save it."""

import pytest

from megakit.checkpoints.manifest import read_manifest
from mnist import files as mnist_files
from mnist import report as digit_report
from tests.mnist.report.pages import Trained, predict, save


@pytest.fixture(scope="session")
def trained(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An autoencoder, and a classifier of digits that was fitted for a second."""
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
    predictions = predict(model, test_images, test_labels)
    return Trained(runs, pretrained, classifier, test_images, predictions, model, autoencoder)


@pytest.fixture(scope="session")
def page(trained: Trained) -> str:
    path = trained.runs / "report.html"
    digit_report.write_digit_report(
        path, trained.predictions, trained.images, trained.classifier, "digits"
    )
    return path.read_text("utf-8")
