"""Means over micro batches and tokens, and outputs that travel as losses."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


def test_mean_is_taken_in_float32() -> None:
    """In bfloat16 the sum of 256 and 1 is 256."""
    from megakit.training import mean_over_data_parallel_ranks

    mean = mean_over_data_parallel_ranks([*torch.tensor([256, 1], dtype=torch.bfloat16)])
    assert (mean.dtype, mean.item()) == (torch.float32, 257 / 2)


def test_logits_of_language_models_have_the_batch_in_their_second_dimension() -> None:
    from megakit.training import PassthroughLossReduction

    outputs: list[Any] = [
        {"token_logits": torch.full((5, 2, 3), float(k)), "z": [(torch.full((2, 3), k),)]}
        for k in range(2)
    ]
    whole = PassthroughLossReduction().reduce(outputs)
    assert whole["token_logits"][0, :, 0].tolist() == [0, 0, 1, 1]
    assert whole["z"][0][0][:, 0].tolist() == [0, 0, 1, 1]


def token_loss() -> Any:
    """The square of each token's output, and its size as a further value."""
    from megakit.training import TokenMeanLossReduction

    class TokenLoss(TokenMeanLossReduction):
        def token_losses(self, batch: Any, forward_out: torch.Tensor) -> torch.Tensor:
            return forward_out.squeeze(-1).square()

        def token_values(self, batch: Any, forward_out: torch.Tensor) -> Any:
            return {"size": forward_out.squeeze(-1).abs()}

    return TokenLoss()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """32 samples of up to 6 tokens of 5 numbers, and a mask of those that are real."""
    lengths = 1 + torch.arange(32) * 6 // 32
    x = torch.randn(32, 6, 5, generator=torch.Generator().manual_seed(2))
    return x, torch.arange(6) < lengths.unsqueeze(1)


class TestTokenMean:
    """Micro batches of unequally many tokens, against one big batch in plain torch."""

    def test_gradients_and_means_are_those_of_one_big_batch(self) -> None:
        """However micro batches share the tokens; padding counts for nothing."""
        loss, (x, mask), reports = token_loss(), tokens(), []
        weight = torch.ones(5, 1, requires_grad=True)
        for part in (slice(0, 5), slice(5, 32)):
            garbage = (x[part] @ weight).masked_fill(~mask[part].unsqueeze(-1), torch.inf)
            batch = {"x": x[part], "loss_mask": mask[part]}
            loss_sum, _, report = loss.forward(batch, garbage)
            loss_sum.backward()
            reports.append(report)
        means: Any = loss.reduce(reports)
        output = (x @ weight).squeeze(-1)[mask]
        (expected,) = torch.autograd.grad(output.square().mean(), weight)
        # Megatron divides by the number of tokens of all micro batches.
        torch.testing.assert_close(weight.grad, expected * mask.sum())
        assert list(means) == ["loss", "size"]
        torch.testing.assert_close(means["loss"], output.square().mean())
        torch.testing.assert_close(means["size"], output.abs().mean())

    def test_values_have_the_shape_of_the_losses(self) -> None:
        """(4,) and (4, 1) would become (4, 4), and the sum 4 times as large."""
        from megakit.training import TokenMeanLossReduction

        class TokenLoss(TokenMeanLossReduction):
            def token_losses(self, batch: Any, forward_out: torch.Tensor) -> torch.Tensor:
                return forward_out

            def token_values(self, batch: Any, forward_out: torch.Tensor) -> Any:
                return {"size": torch.ones(4, 1)}

        with pytest.raises(UserError, match=r"^token value 'size' has the shape .*, and the loss"):
            TokenLoss().forward({}, torch.ones(4))


def normal_loss(output: torch.Tensor, target: torch.Tensor, **how: Any) -> torch.Tensor:
    """The loss of a mean and a variance per sample: shapes that differ, but do not broadcast."""
    return functional.gaussian_nll_loss(output[:, 0], target, output[:, 1], **how)


class TestShapes:
    """With other shapes, torch computes a wrong loss, and at most warns."""

    @pytest.mark.parametrize(("width", "target"), [(3, torch.ones(4, 1)), (1, torch.arange(4))])
    def test_what_is_refused(self, width: int, target: torch.Tensor) -> None:
        from megakit.training import MeanLossReduction

        told = r"^MeanLossReduction: the target has the shape \(4.*\), and the output \(4, .\)\. "
        with pytest.raises(UserError, match=told):
            MeanLossReduction().report(functional.huber_loss, torch.ones(4, width), target, {})

    @pytest.mark.parametrize(
        ("output", "target", "criterion"),
        [
            (torch.ones(4, 3), torch.full((4, 3), 1 / 3), functional.cross_entropy),
            (torch.ones(4, 2), torch.ones(4), normal_loss),
            (torch.ones(4), torch.ones(4, dtype=torch.float64), functional.huber_loss),
        ],
    )
    def test_what_is_right(self, output: Any, target: Any, criterion: Any) -> None:
        from megakit.training import MeanLossReduction

        batch = {"loss_mask": torch.ones(4)}
        loss, _ = MeanLossReduction().report(criterion, output, target, batch)
        assert loss.item() == pytest.approx(criterion(output, target).item())

    @pytest.mark.parametrize("found", [torch.ones(()), torch.ones(4, 4)])
    def test_validation_needs_a_loss_for_each_sample(self, found: torch.Tensor) -> None:
        """The mean of all, or more losses than outputs, as of a closure that broadcasts."""
        from megakit.training import MeanLossReduction

        batch, pair = {"loss_mask": torch.ones(4)}, (torch.ones(4, 1), torch.ones(4, 1))
        with pytest.raises(UserError, match="with reduction='none', the criterion returned"):
            MeanLossReduction().report(lambda *_, reduction: found, *pair, batch)

    def test_one_weight_for_each_sample(self) -> None:
        """Also 0, for outputs that are infinite, because the sample is padding."""
        from megakit.training import mean_over_samples

        weights = torch.tensor([1.5, 1.5, 0])
        assert mean_over_samples(torch.tensor([1, 3, torch.inf]), {"loss_mask": weights}) == 2
        batch = {"loss_mask": torch.tensor([[2.0], [0.0]])}
        told = r"^batch\['loss_mask'\] has the shape \(2, 1\), and the mean of each sample \(2,\)"
        with pytest.raises(UserError, match=told):
            mean_over_samples(torch.ones(2), batch)
