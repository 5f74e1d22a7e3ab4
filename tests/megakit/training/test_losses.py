"""Means over micro batches and tokens, and outputs that travel as losses."""

from types import MappingProxyType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


def test_mean_is_taken_in_float32() -> None:
    """In bfloat16 the sum of 256 and 1 is 256."""
    from megakit.training import mean_over_data_parallel_ranks

    averages = [torch.tensor(value, dtype=torch.bfloat16) for value in (256.0, 1.0)]
    for reports in (averages, averages[1:]):
        mean = mean_over_data_parallel_ranks(reports)
        assert (mean.dtype, mean.shape) == (torch.float32, ())
        assert mean.item() == sum(report.item() for report in reports) / len(reports)
    assert averages[0] == 256


OUTPUTS = {
    "a tensor": (lambda t: t, lambda out: out),
    "a dict": (lambda t: {"z": t, "idx": t[:, 0]}, lambda out: out["z"]),
    "a tuple": (lambda t: (t, t + 1), lambda out: out[0]),
    "nested": (lambda t: [{"x": (t,)}], lambda out: out[0]["x"][0]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_kind_come_back_as_one(kind: str) -> None:
    from megakit.training import PassthroughLossReduction

    wrap, unwrap = OUTPUTS[kind]
    passthrough = PassthroughLossReduction()
    parts = [torch.arange(6.0).reshape(3, 2), torch.arange(4.0).reshape(2, 2)]
    reported = []
    for part in parts:
        loss, report = passthrough.forward({"data": None}, wrap(part))
        assert loss.item() == 0
        assert loss.shape == ()
        reported.append(report)
    whole = passthrough.reduce(reported)
    assert type(whole) is type(wrap(parts[0]))
    assert torch.equal(unwrap(whole), torch.cat(parts))


def test_logits_of_language_models_have_the_batch_in_their_second_dimension() -> None:
    from megakit.training import PassthroughLossReduction

    outputs: list[Any] = [
        {"token_logits": torch.full((5, 2, 3), float(k)), "of": {"z": torch.ones(2, 3)}}
        for k in range(2)
    ]
    whole = PassthroughLossReduction().reduce(outputs)
    assert whole["token_logits"].shape == (5, 4, 3)
    assert whole["token_logits"][0, :, 0].tolist() == [0, 0, 1, 1]
    assert whole["of"]["z"].shape == (4, 3)

    class SequenceFirst(PassthroughLossReduction):
        batch_dims = MappingProxyType({"hidden": 1})

    assert SequenceFirst().reduce([{"hidden": torch.ones(5, 2)}] * 3)["hidden"].shape == (5, 6)


class TestTokenMean:
    """Micro batches of unequally many tokens, against one big batch in plain torch."""

    def test_gradients_and_loss_are_those_of_one_big_batch(self) -> None:
        from tests.megakit.training import tokens

        assert len({int(tokens.data()[1][8 * part : 8 * part + 8].sum()) for part in range(4)}) == 4
        for num_micro_batches in (1, 4):
            loss, gradients = tokens.by_megatron(num_micro_batches)
            tokens.assert_as_of_one_big_batch(loss, gradients)
        with pytest.raises(ValueError, match="calculate_per_token_loss=True"):
            tokens.by_megatron(4, calculate_per_token_loss=False)

    def test_padding_does_not_count(self) -> None:
        """In evaluation the loader multiplies the mask by weights, of which the mean is 1."""
        from tests.megakit.training import tokens

        loss = tokens.TokenLoss()
        x, mask = tokens.data()
        output = x.sum(dim=-1, keepdim=True)
        output[~mask] = torch.inf
        weights = torch.ones(32) * 32 / 30
        weights[-2:] = 0
        batch = {"x": x, "loss_mask": mask * weights.unsqueeze(1)}
        _total, count, report = loss.forward(batch, output)
        assert count == mask[:30].sum()
        mean: Any = loss.reduce([report])
        assert mean.dtype == torch.float32
        torch.testing.assert_close(mean, output[:30, :, 0][mask[:30]].square().mean())
        assert loss.reduce([loss.forward({**batch, "loss_mask": weights * 0}, output)[2]]) == 0
        samples = {"x": x, "loss_mask": torch.arange(32) % 2}  # a mask of samples
        _, count, report = loss.forward(samples, x.sum(dim=-1, keepdim=True))
        assert count == x.shape[1] * 16
        mean = loss.reduce([report])
        torch.testing.assert_close(mean, x.sum(dim=-1)[1::2].square().mean())

    def test_further_values_are_means_over_the_same_tokens(self) -> None:
        """However two micro batches share them; padding counts for nothing."""
        from tests.megakit.training import tokens

        class Named(tokens.TokenLoss):
            def token_values(self, batch: Any, forward_out: torch.Tensor) -> Any:
                return {"size": forward_out.squeeze(-1).abs()}

        loss = Named()
        x, mask = tokens.data()
        output = x.sum(dim=-1, keepdim=True)
        reports = []
        for part in (slice(0, 5), slice(5, 32)):
            batch = {"x": x[part], "loss_mask": mask[part]}
            garbage = output[part].masked_fill(~mask[part].unsqueeze(-1), torch.inf)
            reports.append(loss.forward(batch, garbage)[2])
        means: Any = loss.reduce(reports)
        assert list(means) == ["loss", "size"]
        torch.testing.assert_close(means["size"], output[mask].abs().mean())
        torch.testing.assert_close(means["loss"], output[mask].square().mean())


class TestNamedMeans:
    def test_padding_counts_for_nothing(self) -> None:
        """As the loader marks it: the weights are 0 or so large that they are 1 on average."""
        from megakit.training import mean_over_samples, mean_reports

        values = torch.tensor([1.0, 2.0, 3.0, 6.0, torch.inf, torch.nan], requires_grad=True)
        weights = torch.tensor([6 / 4] * 4 + [0.0] * 2)
        reports = [
            {
                "avg": torch.tensor(0.5),
                "size": mean_over_samples(values[part], {"loss_mask": weights[part]}),
            }
            for part in (slice(0, 2), slice(2, 4), slice(4, 6))
        ]
        means: Any = mean_reports(reports)
        assert list(means) == ["loss", "size"]
        assert means["size"].item() == pytest.approx(3.0)
        assert means["loss"].item() == 0.5
        assert not means["size"].requires_grad

    def test_what_is_reported_is_a_copy(self) -> None:
        """Megatron divides the loss in place by the number of micro batches."""
        from megakit.training import MeanLossReduction

        output, target = torch.full((4,), 3.0, requires_grad=True), torch.zeros(4)
        loss, reported = MeanLossReduction().report(
            torch.nn.functional.mse_loss, output, target, {}
        )
        assert loss.requires_grad
        assert not reported["avg"].requires_grad
        loss /= 8
        assert reported["avg"].item() == 9.0


def test_a_loss_of_many_numbers_cannot_be_backpropagated() -> None:
    from megakit.training import MeanLossReduction

    def differences(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output - target

    with pytest.raises(ValueError, match=r"MeanLossReduction: the criterion returned .*\(4, 2\)"):
        MeanLossReduction().report(differences, torch.ones(4, 2), torch.ones(4, 2), {})
