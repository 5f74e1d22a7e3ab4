"""The parts that readers copy: losses, data, models and the metric tracker."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.single_process import single_process


@pytest.fixture(scope="module")
def components() -> Iterator[ModuleType]:
    """`model_components`, which can be imported once an accelerator was chosen."""
    with single_process():
        import model_components

        yield model_components


def test_all_names_of_the_tutorial_are_there(components: ModuleType) -> None:
    for name in (
        *("SameSizeLossDict", "MSELossReduction", "ClassifierLossReduction", "MnistItem"),
        *("MNISTCustom", "MNISTDataModule", "ExampleModelOutput", "ExampleModelTrunk"),
        *("PretrainModel", "ExampleFineTuneModel", "ExampleGenericConfig", "PretrainConfig"),
        *("ExampleFineTuneConfig", "BionemoLightningModule", "MetricTracker"),
    ):
        assert hasattr(components, name), name


# --- Losses ---------------------------------------------------------------------------------------


def test_mean_squared_error_by_hand(components: ModuleType) -> None:
    images = torch.zeros(2, 1, 28, 28)
    x_hat = torch.zeros(2, 784)
    x_hat[0] = 0.5
    x_hat[1, :196] = 1.0  # a quarter of the pixels
    batch = {"data": images, "corrupted": torch.ones_like(images)}  # these are not the target
    loss, reported = components.MSELossReduction().forward(batch, {"x_hat": x_hat})
    assert loss.item() == reported["avg"].item() == (0.25 + 0.25) / 2


def test_the_target_is_not_rounded_to_the_models_precision(components: ModuleType) -> None:
    images = torch.full((1, 1, 28, 28), 0.501)  # 0.5 in bfloat16
    x_hat = torch.full((1, 784), 0.5, dtype=torch.bfloat16)
    loss, _ = components.MSELossReduction().forward({"data": images}, {"x_hat": x_hat})
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1e-6, rel=1e-3)


def test_cross_entropy_by_hand(components: ModuleType) -> None:
    logits = torch.zeros(2, 10)
    logits[1, 3] = math.log(9)  # odds of 9 : 9
    labels = torch.tensor([7, 3])
    loss, reported = components.ClassifierLossReduction().forward({"label": labels}, logits)
    assert loss.item() == pytest.approx((math.log(10) + math.log(2)) / 2)
    assert reported["avg"].item() == loss.item()


def a_batch(size: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Images and labels, and what models of both kinds return on them."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        "data": torch.rand(size, 1, 28, 28, generator=generator),
        "label": torch.randint(10, (size,), generator=generator),
    }
    x_hat = torch.rand(size, 784, generator=generator, requires_grad=True)
    logits = torch.rand(size, 10, generator=generator, requires_grad=True)
    return batch, {"MSELossReduction": {"x_hat": x_hat}, "ClassifierLossReduction": logits}


both_losses = pytest.mark.parametrize("name", ["MSELossReduction", "ClassifierLossReduction"])


@both_losses
def test_what_is_reported_is_a_copy(components: ModuleType, name: str) -> None:
    """Megatron divides the loss in place by the number of micro batches."""
    batch, outputs = a_batch(4)
    loss, reported = getattr(components, name)().forward(batch, outputs[name])
    before = reported["avg"].item()
    assert loss.requires_grad
    assert not reported["avg"].requires_grad
    loss /= 8
    assert reported["avg"].item() == before


@both_losses
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 10, 16])
def test_padding_never_changes_the_mean(components: ModuleType, name: str, batch_size: int) -> None:
    """Ten images, in batches of any size, with NeMo's mean over steps of equal weight."""
    from megakit.data.loader import make_loader
    from megakit.data.sampler import GlobalBatchSampler

    loss = getattr(components, name)()
    batch, outputs = a_batch(10)
    _, plain = loss.forward(batch, outputs[name])
    dataset = [{key: batch[key][i] for key in batch} | {"idx": i} for i in range(10)]
    sampler = GlobalBatchSampler(10, batch_size, batch_size, pad=True)
    template: Any = torch.utils.data.DataLoader(dataset)  # type: ignore[arg-type]
    means = []
    for part in make_loader(template, sampler, mark_padding=True):
        output, indices = outputs[name], part["idx"]
        if isinstance(output, dict):
            output = {"x_hat": output["x_hat"][indices]}
        else:
            output = output[indices]
        means.append(loss.reduce([loss.forward(part, output)[1]]))
    assert len(means) == -(-10 // batch_size)
    torch.testing.assert_close(torch.stack(means).mean(), plain["avg"])


@both_losses
def test_reduce_is_the_mean_of_micro_batches(components: ModuleType, name: str) -> None:
    reported = [{"avg": torch.tensor(value)} for value in (1.0, 2.0, 6.0)]
    assert getattr(components, name)().reduce(reported).item() == 3.0


# --- Data -----------------------------------------------------------------------------------------


def test_items_of_mnist(components: ModuleType, mnist_dir: Path) -> None:
    from torchvision.datasets import MNIST

    test = components.MNISTCustom(mnist_dir, train=False)
    theirs = MNIST(str(mnist_dir), train=False)
    assert len(test) == 10_000
    assert len(components.MNISTCustom(mnist_dir)) == 60_000
    for index in (0, 1234, 9999):
        item = test[index]
        assert set(item) == {"data", "label", "idx"}
        assert (item["data"].shape, item["data"].dtype) == ((1, 28, 28), torch.float32)
        image, label = theirs[index]
        assert torch.equal(item["data"][0], torch.from_numpy(np.array(image)).float() / 255)
        assert (int(item["label"]), int(item["idx"])) == (label, index)
    assert int(test[-1]["idx"]) == 9999
    with pytest.raises(IndexError):
        test[10_000]


def test_batches_are_collated_items(components: ModuleType, mnist_dir: Path) -> None:
    test = components.MNISTCustom(mnist_dir, train=False)
    indices = np.array([3, 9999, 3])
    batch = test.get_batch(indices)
    expected = torch.utils.data.default_collate([test[int(index)] for index in indices])
    assert batch.keys() == expected.keys()
    for key in batch:
        assert batch[key].dtype == expected[key].dtype
        assert torch.equal(batch[key], expected[key]), key
    assert batch["label"].dtype == batch["idx"].dtype == torch.int64


def test_items_and_batches_have_their_types(components: ModuleType) -> None:
    from typing import get_type_hints

    from mnist.dataset import MnistBatch

    val = digits(components, corruption=0.3).mnist_val
    corrupted = digits(components, corruption=0.3).mnist_train
    item_types = get_type_hints(components.MnistItem)
    assert item_types == {"data": torch.Tensor, "label": int, "idx": int}
    assert {name: type(value) for name, value in val[3].items()} == item_types
    assert MnistBatch.__required_keys__ == item_types.keys()
    batch = corrupted.get_batch(np.arange(4))
    assert batch.keys() - MnistBatch.__required_keys__ == {"corrupted"}
    assert batch.keys() < get_type_hints(MnistBatch).keys()
    assert {type(value) for value in batch.values()} == {torch.Tensor}


def test_negative_indices_count_from_the_end(components: ModuleType) -> None:
    val = digits(components).mnist_val
    last, batch = val[-1], val.get_batch(np.array([-1, 0]))
    assert last["idx"] == 199
    assert batch["idx"].tolist() == [199, 0]
    assert torch.equal(batch["data"][0], val[199]["data"])
    for index in (200, -201):
        with pytest.raises(IndexError):
            val[index]


def test_a_transform_of_the_users_own(components: ModuleType, mnist_dir: Path) -> None:
    from PIL.Image import Image

    seen = []

    def inverted(image: Image) -> torch.Tensor:
        seen.append(image.size)
        return 1 - torch.from_numpy(np.array(image)).unsqueeze(0).float() / 255

    plain = components.MNISTCustom(mnist_dir, train=False)
    mine = components.MNISTCustom(mnist_dir, train=False, transform=inverted)
    assert torch.equal(mine[5]["data"], 1 - plain[5]["data"])
    indices = np.arange(4)
    assert torch.equal(mine.get_batch(indices)["data"], 1 - plain.get_batch(indices)["data"])
    assert seen == [(28, 28)] * 5


def indices_of(dataset: Any) -> list[int]:
    return [int(i) for i in dataset.indices]


@pytest.mark.parametrize("seed", [42, 7])
def test_split_is_the_tutorials_whatever_the_seed(
    components: ModuleType, mnist_dir: Path, seed: int
) -> None:
    data = components.MNISTDataModule(data_dir=str(mnist_dir), batch_size=32, seed=seed)
    data.setup("fit")
    everything: Any = range(60_000)
    train, validation = torch.utils.data.random_split(
        everything, [55_000, 5_000], generator=torch.Generator().manual_seed(42)
    )
    assert (len(data.mnist_train), len(data.mnist_val), len(data.mnist_test)) == (55e3, 5e3, 10e3)
    assert indices_of(data.mnist_val) == list(validation.indices)
    drawn = [int(data.mnist_train[i]["idx"]) for i in range(0, 55_000, 500)]
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= set(train.indices)


def digits(components: ModuleType, **options: Any) -> Any:
    data = components.MNISTDataModule(dataset="digits", **options)
    data.setup("fit")
    return data


def test_digits_need_no_files(components: ModuleType) -> None:
    data = digits(components, data_dir="/no/such/folder")
    assert (len(data.mnist_train), len(data.mnist_val), len(data.mnist_test)) == (1297, 200, 300)
    item = data.mnist_train[0]
    assert (item["data"].shape, item["data"].dtype) == ((1, 28, 28), torch.float32)
    assert 0 <= item["data"].min() < item["data"].max() <= 1


def test_an_epoch_sees_every_image_once_in_another_order(components: ModuleType) -> None:
    data = digits(components)
    data.trainer = SimpleNamespace(max_steps=100, global_step=0)
    data.setup("fit")
    assert len(data.mnist_train) == 100 * 32  # as long as the training
    epochs = [[int(data.mnist_train[e * 1297 + i]["idx"]) for i in range(1297)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1297))
    assert epochs[0] != epochs[1]


def labelled(components: ModuleType, num_labels: int, seed: int) -> tuple[set[int], list[int]]:
    """Indices and labels of the images that an epoch sees."""
    data = digits(components, num_labels=num_labels, seed=seed)
    items = [data.mnist_train[i] for i in range(len(data.mnist_train))]
    return {int(item["idx"]) for item in items}, [int(item["label"]) for item in items]


def test_few_labels_are_balanced_and_drawn_by_the_seed(components: ModuleType) -> None:
    indices, labels = labelled(components, 100, seed=1)
    assert len(indices) == 100
    assert np.bincount(labels).tolist() == [10] * 10
    assert labelled(components, 100, seed=1)[0] == indices
    assert labelled(components, 100, seed=2)[0] != indices
    assert labelled(components, 50, seed=1)[0] < indices
    _, labels = labelled(components, 25, seed=1)
    assert set(np.bincount(labels, minlength=10)) == {2, 3}


def test_corruption_is_drawn_anew_each_epoch_by_seed_epoch_and_index(
    components: ModuleType,
) -> None:
    from megakit.data import EpochIndex

    def dataset(seed: int) -> Any:
        return digits(components, corruption=0.3, seed=seed).mnist_train.dataset

    first = dataset(1)
    epochs = [first[EpochIndex(epoch, 5)] for epoch in (0, 1)]
    for item in epochs:
        kept = item["corrupted"] != 0
        assert torch.equal(item["corrupted"][kept], item["data"][kept])
    assert torch.equal(epochs[0]["data"], epochs[1]["data"])
    assert not torch.equal(epochs[0]["corrupted"], epochs[1]["corrupted"])
    again = dataset(1)[EpochIndex(0, 5)]
    assert torch.equal(again["corrupted"], epochs[0]["corrupted"])
    assert not torch.equal(dataset(2)[EpochIndex(0, 5)]["corrupted"], epochs[0]["corrupted"])

    batch = first.get_batch(EpochIndex(np.array([0, 1]), np.array([5, 5])))
    assert torch.equal(batch["corrupted"], torch.stack([item["corrupted"] for item in epochs]))


def test_corruption_drops_the_share_asked_for(components: ModuleType) -> None:
    white = components.MNISTCustom.from_arrays(
        np.full((50, 28, 28), 255, np.uint8), np.zeros(50, np.uint8)
    )
    dropped = components.DropPixels(white, share=0.3, seed=1)
    from megakit.data import EpochIndex

    batch = dropped.get_batch(EpochIndex(np.zeros(50, np.int64), np.arange(50)))
    assert (batch["corrupted"] == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert batch["data"].min() == 1


def test_validation_and_test_images_are_never_corrupted(components: ModuleType) -> None:
    data = digits(components, corruption=0.3)
    assert "corrupted" in data.mnist_train[0]
    assert "corrupted" not in data.mnist_val[0]
    assert "corrupted" not in data.mnist_test[0]


def test_loaders_say_what_they_are_for(components: ModuleType) -> None:
    """`train` resumes where training stopped; the others begin at their first image."""
    data = digits(components)
    loaders = {
        "train": (data.train_dataloader(), data.mnist_train),
        "validation": (data.val_dataloader(), data.mnist_val),
        "test": (data.test_dataloader(), data.mnist_test),
        "predict": (data.predict_dataloader(), data.mnist_test),
    }
    for mode, (loader, dataset) in loaders.items():
        assert loader.mode == mode
        assert loader.dataset is dataset


# --- Models ---------------------------------------------------------------------------------------


def test_pretrain_model(components: ModuleType) -> None:
    model = components.PretrainConfig().configure_model()
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes == {
        **{"linear1.weight": (64, 784), "linear1.bias": (64,)},
        **{"linear2.weight": (3, 64), "linear2.bias": (3,)},
        **{"linear3.weight": (64, 3), "linear3.bias": (64,)},
        **{"linear4.weight": (784, 64), "linear4.bias": (784,)},
    }
    assert (model.linear2.in_features, model.linear2.out_features) == (64, 3)
    images = torch.rand(5, 1, 28, 28)
    output = model(images)
    hidden = model.linear1.weight @ images.flatten(1).T + model.linear1.bias[:, None]
    z = model.linear2.weight @ hidden.relu() + model.linear2.bias[:, None]
    torch.testing.assert_close(output["z"], z.T)
    hidden = model.linear3.weight @ z + model.linear3.bias[:, None]
    x_hat = model.linear4.weight @ hidden.relu() + model.linear4.bias[:, None]
    torch.testing.assert_close(output["x_hat"], x_hat.T)


def test_the_model_is_given_the_corrupted_images(components: ModuleType) -> None:
    module = components.BionemoLightningModule(config=components.PretrainConfig())
    module.configure_model()
    clean, corrupted = torch.rand(2, 4, 1, 28, 28)
    for batch, seen in (
        ({"data": clean, "corrupted": corrupted}, corrupted),
        ({"data": clean}, clean),
    ):
        for step in (module.training_step, module.forward_step, module.validation_step):
            assert torch.equal(step(batch)["x_hat"], module.module(seen)["x_hat"])


def test_fine_tune_model(components: ModuleType) -> None:
    config = components.ExampleFineTuneConfig(hidden_size=32, latent_size=5)
    model = config.configure_model()
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes == {
        **{"linear1.weight": (32, 784), "linear1.bias": (32,)},
        **{"linear2.weight": (5, 32), "linear2.bias": (5,)},
        **{"digit_classifier.weight": (10, 5), "digit_classifier.bias": (10,)},
    }
    assert (model.digit_classifier.in_features, model.digit_classifier.out_features) == (5, 10)
    assert model(torch.rand(4, 1, 28, 28)).shape == (4, 10)


def test_the_classifier_returns_latents_when_asked(components: ModuleType) -> None:
    model = components.ExampleFineTuneConfig(latent_size=5).configure_model()
    images = torch.rand(4, 1, 28, 28)
    logits, z = model(images, return_latent=True)
    assert torch.equal(logits, model(images))
    assert torch.equal(z, components.ExampleModelTrunk.forward(model, images))
    torch.testing.assert_close(logits, model.digit_classifier(z))
    assert not hasattr(model, "z")


@pytest.mark.parametrize("has_latent", [True, False])
def test_prediction_asks_for_latents_where_there_are_some(
    components: ModuleType, has_latent: bool
) -> None:
    class WithoutLatents(components.ExampleFineTuneModel):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x)

    config = components.ExampleFineTuneConfig()
    if not has_latent:
        config.model_cls = WithoutLatents
    module = components.BionemoLightningModule(config=config)
    module.configure_model()
    batch = {
        **{"data": torch.rand(4, 1, 28, 28), "label": torch.arange(4)},
        **{"idx": torch.arange(4), "loss_mask": torch.ones(4)},
    }
    found = module.predict_step(batch)
    expected = {"output", "idx", "label", "loss_mask", *(["latent"] if has_latent else [])}
    assert found.keys() == expected
    assert torch.equal(found["output"], module.module(batch["data"]))
    if has_latent:
        assert found["latent"].shape == (4, 3)
    assert torch.equal(module.training_step(batch), found["output"])


def test_stages_before_the_last_return_what_the_next_one_needs(
    components: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether latents are asked for or not: only the last stage returns them."""
    from megatron.core import parallel_state

    whole = components.ExampleFineTuneConfig(seed=1).configure_model()
    images = torch.rand(4, 1, 28, 28)
    logits, z = whole(images, return_latent=True)
    stages = []
    for is_first in (True, False):
        for name, answer in (("first", is_first), ("last", not is_first)):
            monkeypatch.setattr(
                parallel_state, f"is_pipeline_{name}_stage", lambda *_, a=answer, **__: a
            )
        stages.append(components.ExampleFineTuneModel(components.ExampleFineTuneConfig(seed=1)))
    first, last = stages
    for options in ({}, {"return_latent": True}):
        assert torch.equal(first(images, **options), z[None])
    last.set_input_tensor([first(images)])
    assert torch.equal(last(images), logits)
    found = last(images, return_latent=True)
    assert torch.equal(found[0], logits)
    assert torch.equal(found[1], z)


def test_configs_name_their_models_and_losses(components: ModuleType) -> None:
    for config, model, loss in (
        ("PretrainConfig", "PretrainModel", "MSELossReduction"),
        ("ExampleFineTuneConfig", "ExampleFineTuneModel", "ClassifierLossReduction"),
    ):
        made = getattr(components, config)()
        assert made.model_cls is getattr(components, model)
        assert made.get_loss_reduction_class() is getattr(components, loss)
        module = components.BionemoLightningModule(config=made)
        assert module.loss_reduction_class() is getattr(components, loss)
        for reduction in (module.training_loss_reduction, module.validation_loss_reduction):
            assert isinstance(reduction(), getattr(components, loss))


def test_the_trunk_starts_alike_in_both_models(components: ModuleType) -> None:
    """So that with and without pretraining differ by the pretraining."""
    pretrain = components.PretrainConfig(seed=3).configure_model()
    fine_tune = components.ExampleFineTuneConfig(seed=3).configure_model()
    other = components.ExampleFineTuneConfig(seed=4).configure_model()
    for name in ("linear1", "linear2"):
        weight = getattr(pretrain, name).weight
        assert torch.equal(weight, getattr(fine_tune, name).weight)
        assert not torch.equal(weight, getattr(other, name).weight)


# --- Metrics --------------------------------------------------------------------------------------


def test_metric_tracker(components: ModuleType) -> None:
    from megakit.training import MetricTracker

    tracker = MetricTracker(metrics_to_track_val=["loss"], metrics_to_track_train=["loss", "size"])
    trainer: Any = SimpleNamespace(logged_metrics={"val_loss": torch.tensor(0.5)})
    module: Any = None
    for loss in (3.0, 2.0):
        outputs = {"loss": torch.tensor(loss), "size": 4, "other": None}
        tracker.on_train_batch_end(trainer, module, outputs, None, 0)
        tracker.on_validation_batch_end(trainer, module, torch.tensor(loss + 1), None, 0)
    tracker.on_validation_batch_end(trainer, module, {"loss": torch.tensor(9.0)}, None, 0)
    tracker.on_validation_epoch_end(trainer, module)
    trainer.logged_metrics = {"val_loss": torch.tensor(0.25)}
    tracker.on_validation_epoch_end(trainer, module)
    tracker.on_train_epoch_end(trainer, module)

    train, val = tracker.collection_train, tracker.collection_val
    assert train.keys() == {"loss", "size", "logged_metrics"}
    assert train["loss"].tolist() == [3.0, 2.0]
    assert train["size"].tolist() == [4, 4]
    assert val["unnamed"].tolist() == [4.0, 3.0]
    assert val["loss"].tolist() == [9.0]
    assert val["logged_metrics"] == [{"val_loss": 0.5}, {"val_loss": 0.25}]
    assert train["logged_metrics"] == [{"val_loss": 0.25}]


def test_metric_tracker_before_any_step(components: ModuleType) -> None:
    from megakit.training import MetricTracker

    tracker = MetricTracker(metrics_to_track_val=[], metrics_to_track_train=[])
    assert tracker.collection_val == tracker.collection_train == {"logged_metrics": []}
