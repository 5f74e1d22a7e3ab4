"""Both models and both losses by hand, and the module that trains them."""

from types import ModuleType

import pytest
import torch


def test_pretrain_model(components: ModuleType) -> None:
    model = components.PretrainConfig().configure_model()
    assert [w.shape for w in model.parameters() if w.dim() == 2] == [
        *((64, 784), (3, 64), (64, 3), (784, 64))
    ]
    images = torch.rand(5, 1, 28, 28)
    output = model(images)
    hidden = model.linear1.weight @ images.flatten(1).T + model.linear1.bias[:, None]
    z = model.linear2.weight @ hidden.relu() + model.linear2.bias[:, None]
    torch.testing.assert_close(output["z"], z.T)
    hidden = model.linear3.weight @ z + model.linear3.bias[:, None]
    x_hat = model.linear4.weight @ hidden.relu() + model.linear4.bias[:, None]
    torch.testing.assert_close(output["x_hat"], x_hat.T)


def test_the_classifier_returns_latents_when_asked(components: ModuleType) -> None:
    model = components.ExampleFineTuneConfig(hidden_size=32, latent_size=5).configure_model()
    assert model.linear1.weight.shape == (32, 784)
    images = torch.rand(4, 1, 28, 28)
    logits, z = model(images, return_latent=True)
    assert (logits.shape, z.shape) == ((4, 10), (4, 5))
    assert torch.equal(logits, model(images))
    assert torch.equal(z, components.ExampleModelTrunk.forward(model, images))
    torch.testing.assert_close(logits, model.digit_classifier(z))
    assert not hasattr(model, "z")


def test_the_trunk_starts_alike_in_both_models(components: ModuleType) -> None:
    """So that with and without pretraining differ by the pretraining."""
    pretrain = components.PretrainConfig(seed=3).configure_model()
    fine_tune = components.ExampleFineTuneConfig(seed=3).configure_model()
    other = components.ExampleFineTuneConfig(seed=4).configure_model()
    for name in ("linear1", "linear2"):
        weight = getattr(pretrain, name).weight
        assert torch.equal(weight, getattr(fine_tune, name).weight)
        assert not torch.equal(weight, getattr(other, name).weight)


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
