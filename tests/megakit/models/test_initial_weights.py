"""In a pipeline, a model whose first weights belong to the layout is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megakit.errors import UserError

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:.*no manifest"),
]


@pytest.fixture(autouse=True)
def pipeline(monkeypatch: pytest.MonkeyPatch, megatron: None) -> None:
    """tests/parallel/test_initial_weights.py has real pipelines."""
    from megakit.models import initial_weights

    monkeypatch.setattr(initial_weights, "_is_pipeline", lambda: True)


def build(make: Callable[[], nn.Module], **options: Any) -> nn.Module:
    from megakit.models.initial_weights import build_independent_of_layout

    return build_independent_of_layout(make, **options)


class Unseeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from megakit.models import seeded

        with seeded(1, "fine"):
            self.fine = nn.Linear(3, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.LayerNorm(3)
        self.register_buffer("directions", torch.randn(2))


def seeded_model() -> nn.Module:
    from megakit.models import seeded

    with seeded(1, "layer"):
        return nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.LayerNorm(3))


def seeded_by_hand() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 3)


def only_draws() -> nn.Module:
    torch.rand(3)
    return nn.Sequential(nn.Dropout(), nn.LayerNorm(3))


@pytest.mark.parametrize("make", [seeded_model, seeded_by_hand, only_draws])
def test_a_model_with_the_same_weights_is_accepted(make: Any) -> None:
    torch.manual_seed(0)
    expected = make().state_dict()
    after = torch.rand(3)
    torch.manual_seed(0)
    weights = build(make).state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert torch.equal(torch.rand(3), after)  # as if it had been built once


def test_the_error_names_the_layers_and_the_cure() -> None:
    with pytest.raises(UserError) as refused:
        build(Unseeded)
    message = str(refused.value)
    assert "Unseeded: the initial weights of layers.0.weight, layers.0.bias, layers.1.weight, " in (
        message
    )
    assert "and 3 others depend on the layout" in message
    for cure in ('`with seeded(config.seed, "name"):`', "transformer_block_spec", "SeededGPTModel"):
        assert cure in message
    assert "fine" not in message
    assert "norm" not in message


def test_only_weights_that_no_checkpoint_has_count() -> None:
    assert build(Unseeded, drawn=["fine", "norm"])
    assert build(Unseeded, drawn=[])
    with pytest.raises(UserError, match=r"of layers.1.weight, layers.1.bias, directions depend"):
        build(Unseeded, drawn=["layers.1", "directions"])


def test_weights_from_megatrons_generator_count() -> None:
    """As Megatron draws them on a GPU if `use_cpu_initialization` is False."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def make() -> nn.Module:
        with get_cuda_rng_tracker().fork():
            return nn.Linear(3, 3)

    before = torch.get_rng_state()
    with pytest.raises(UserError, match="of weight, bias depend"):
        build(make)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_config_counts_the_weights_that_it_skips(tmp_path: Path) -> None:
    from tests.megakit.models.networks import Net, NetConfig, save_checkpoint

    class NetWithHead(Net):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.head = nn.Linear(2, config.num_classes)

    checkpoint = str(save_checkpoint(tmp_path / "checkpoint", Net(NetConfig())))

    def configure(**options: Any) -> Any:
        return NetConfig(model_cls=NetWithHead, **options).configure_model()

    refusal = "NetWithHead: the initial weights of head.weight, head.bias depend"
    with pytest.raises(UserError, match=refusal):
        configure()
    assert configure(initial_ckpt_path=checkpoint)
    with pytest.raises(UserError, match=refusal):
        configure(initial_ckpt_path=checkpoint, initial_ckpt_skip_keys_with_these_prefixes={"head"})


def test_without_a_pipeline_any_model_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert build(Unseeded)
