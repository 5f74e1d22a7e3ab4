"""Models for inference: Megatron's numbers, no parallel state, and nobody else's is touched."""

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:.*no manifest", "ignore:Apex is not installed"),
]

LLAMA = {
    **{"positions": "rope", "tied_weights": False, "gated_linear_unit": True},
    **{"num_query_groups": 2, "add_bias_linear": False, "normalization": "RMSNorm"},
    "rotary_interleaved": True,
}


def load(checkpoint: Path, config: Any = None, **options: Any) -> Any:
    from megakit.models import load_for_inference

    return load_for_inference(checkpoint, config, **options)


def save(folder: Path, model: Any) -> Path:
    from tests.megakit.models.networks import save_checkpoint

    return save_checkpoint(folder, model)


@contextlib.contextmanager
def no_parallel_state() -> Iterator[None]:
    from megatron.core import parallel_state

    state = vars(parallel_state)
    before = {name: state[name] for name in state if name.startswith("_") and name.isupper()}
    state.update(dict.fromkeys(before))
    try:
        yield
    finally:
        state.update(before)


# ---- Small networks ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(megatron: None) -> Any:
    """A model of another width and with another head than its config's defaults."""
    from tests.megakit.models.networks import Net, NetConfig

    return Net(NetConfig(seed=1, hidden_size=12, num_classes=7))


@pytest.fixture(scope="module")
def checkpoint(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("net"), trained)


def test_the_model_is_plain_and_gives_the_same(trained: Any, checkpoint: Path) -> None:
    from megatron.core import parallel_state

    before, drawn = dict(vars(parallel_state)), torch.get_rng_state()
    model = load(checkpoint)
    assert vars(parallel_state) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert isinstance(model.first, torch.nn.Linear)
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.state_dict().keys() == dict(trained.named_parameters()).keys()
    x = torch.randn(5, 6)
    with no_parallel_state():
        found = model(x)
    torch.testing.assert_close(found, trained(x), rtol=0, atol=1e-6)


def test_nothing_is_imported_because_a_checkpoint_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strangers_code.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    mine = Path(shutil.copytree(checkpoint, tmp_path / "mine"))
    context = mine / "context" / "io.json"
    named = '"module": "tests.megakit.models.networks", "name": "NetConfig"'
    text = context.read_text()
    assert named in text
    for module, name in (("strangers_code", "NetConfig"), ("torch", "Tensor")):
        context.write_text(text.replace(named, f'"module": "{module}", "name": "{name}"'))
        with pytest.raises(UserError, match=f"{name} is not imported from the module {module}, or"):
            load(mine)
    assert not (tmp_path / "trace").exists()


# ---- Language models ---------------------------------------------------------------------------


def language_model(**settings: Any) -> Any:
    """Megatron's model; weights are large enough that each layer changes the outputs."""
    from tests.megakit.models.language import LanguageConfig, LanguageModel

    model = LanguageModel(LanguageConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():  # biases too, which Megatron leaves at zero
        weight.data.normal_(std=0.3, generator=generator)
    return model


def text(batch: int, length: int) -> torch.Tensor:
    return torch.randint(32, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("settings", [{}, LLAMA], ids=["gpt", "llama"])
def test_logits_losses_masks_and_the_cache(settings: dict[str, Any], tmp_path: Path) -> None:
    """Outputs are Megatron's; a prompt, single tokens and several tokens through the cache, too."""
    from megatron.core.inference.contexts import StaticInferenceContext

    from megakit.models import SeededGPTModel

    trained = language_model(**settings)
    plain = load(save(tmp_path / "checkpoint", trained))
    for batch, length in ((1, 1), (5, 24)):
        tokens, labels = text(batch, length), text(batch, length).roll(-1, dims=1)
        logits, losses = trained(tokens), trained(tokens, labels)
        with no_parallel_state(), ThreadPoolExecutor(1) as other_thread:
            found = other_thread.submit(plain, tokens).result()
            found_losses = other_thread.submit(plain, tokens, labels).result()
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-6)
        torch.testing.assert_close(found_losses, losses, rtol=0, atol=2e-6)
    # The comparison is able to fail.
    assert not torch.allclose(plain(tokens), plain(tokens.roll(1, dims=1)), atol=1e-2)

    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1).repeat(5, 1, 1, 1)
    hidden[2, :, :, :4] = True  # padding in front, whose own queries see nothing
    masked = (tokens, torch.arange(24).expand(5, -1), hidden)
    logits = SeededGPTModel.forward(trained, *masked, runtime_gather_output=True)
    with no_parallel_state():
        found = SeededGPTModel.forward(plain, *masked, runtime_gather_output=True)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-6)
    assert not torch.allclose(found[2], plain(tokens)[2], atol=1e-2)

    tokens = text(3, 14)
    context = StaticInferenceContext(max_batch_size=3, max_sequence_length=24)
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 12), (12, 14)):
        positions = torch.arange(start, end).expand(3, -1)
        options = {"inference_context": context, "runtime_gather_output": True}
        with no_parallel_state():
            logits = SeededGPTModel.forward(plain, tokens[:, start:end], positions, None, **options)
        context.sequence_len_offset = end
        expected = plain(tokens)[:, end - 1]
        torch.testing.assert_close(logits[:, -1], expected, rtol=0, atol=1e-6)


def test_layers_without_a_plain_form_are_listed(tmp_path: Path) -> None:
    from tests.megakit.models.language import LanguageConfig

    checkpoint = save(tmp_path / "checkpoint", language_model(num_layers=1))
    layer = "decoder.layers.0.self_attention.core_attention (ScaledDotProductAttention)"
    limited: Any = {"window_size": (2, 0), "override_parent_fields": ["window_size"]}
    with pytest.raises(UserError) as error:
        load(checkpoint, LanguageConfig(num_layers=1, **limited))
    assert f"these layers cannot be replaced by torch layers: {layer}. Use" in str(error.value)


def test_settings_that_the_class_refuses_are_not_called_damage(checkpoint: Path) -> None:
    from tests.megakit.models.networks import NetConfig

    class Changed(NetConfig):
        def __post_init__(self) -> None:
            super().__post_init__()
            if self.initial_ckpt_path is None:  # when the checkpoint's settings are set
                raise TypeError("its width has another meaning")

    told = r"its settings of Changed: cannot be read \(its width .*They do not fit the class: use"
    with pytest.raises(UserError, match=told), pytest.warns(UserWarning, match="verified"):
        load(checkpoint, Changed(initial_ckpt_path="x"))
