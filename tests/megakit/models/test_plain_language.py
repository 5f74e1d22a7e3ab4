"""Language models for inference: Megatron's outputs, without process groups, and its cache."""

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:.*no manifest", "ignore:Apex is not installed"),
]

HERE = Path(__file__).resolve().parent
LLAMA = {
    **{"positions": "rope", "tied_weights": False, "gated_linear_unit": True},
    **{"num_query_groups": 2, "add_bias_linear": False, "normalization": "RMSNorm"},
}
VARIANTS = [{}, {"tied_weights": False}, {"positions": "rope", "rotary_interleaved": True}, LLAMA]


def language_model(**settings: Any) -> Any:
    """Megatron's model; weights are large enough that each layer changes the outputs."""
    from tests.megakit.models.language import LanguageConfig, LanguageModel

    model = LanguageModel(LanguageConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():  # biases too, which Megatron leaves at zero
        weight.data.normal_(std=0.3, generator=generator)
    return model


def save(folder: Path, model: Any) -> Path:
    from tests.megakit.models.networks import save_checkpoint

    return save_checkpoint(folder, model)


def load(checkpoint: Path) -> Any:
    from megakit.models import load_for_inference

    return load_for_inference(checkpoint)


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


def text(batch: int, length: int) -> torch.Tensor:
    return torch.randint(32, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_logits_and_losses_are_megatrons(settings: dict[str, Any], tmp_path: Path) -> None:
    trained = language_model(**settings)
    plain = load(save(tmp_path / "checkpoint", trained))
    assert plain.state_dict().keys() == dict(trained.named_parameters()).keys()
    for name, weight in trained.named_parameters():
        assert torch.equal(plain.state_dict()[name], weight), name
    for batch, length in ((1, 1), (3, 24), (5, 7)):
        tokens, labels = text(batch, length), text(batch, length).roll(-1, dims=1)
        logits, losses = trained(tokens), trained(tokens, labels)
        with no_parallel_state(), ThreadPoolExecutor(1) as other_thread:
            found = other_thread.submit(plain, tokens).result()
            found_losses = other_thread.submit(plain, tokens, labels).result()
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-6)
        torch.testing.assert_close(found_losses, losses, rtol=0, atol=2e-6)
    # The comparison is able to fail.
    assert not torch.allclose(plain(tokens), plain(tokens.roll(1, dims=1)), atol=1e-2)


@pytest.mark.parametrize("settings", [{}, LLAMA], ids=str)
def test_decoding_with_megatrons_cache(settings: dict[str, Any], tmp_path: Path) -> None:
    """A prompt, then single tokens and several tokens at once."""
    from megatron.core.inference.contexts import StaticInferenceContext

    from megakit.models import SeededGPTModel

    plain = load(save(tmp_path / "checkpoint", language_model(**settings)))
    tokens = text(3, 14)
    expected = plain(tokens)
    context = StaticInferenceContext(max_batch_size=3, max_sequence_length=24)
    with no_parallel_state():
        for start, end in ((0, 5), (5, 6), (6, 7), (7, 12), (12, 14)):
            positions = torch.arange(start, end).expand(3, -1)
            logits = SeededGPTModel.forward(
                plain,
                tokens[:, start:end],
                positions,
                None,
                inference_context=context,
                runtime_gather_output=True,
            )
            context.sequence_len_offset = end
            torch.testing.assert_close(logits[:, -1], expected[:, end - 1], rtol=0, atol=1e-6)
    shifted = plain(tokens.roll(1, dims=1))
    assert not torch.allclose(shifted[:, -1], expected[:, -1], atol=1e-2)


def save_as(layout: dict[str, Any], settings: dict[str, Any], checkpoint: Path, to: Path) -> None:
    """Loads a checkpoint under a layout and saves what its ranks have."""
    from megatron.core import dist_checkpointing
    from torch.distributed import barrier, get_rank

    from megakit.checkpoints.context import write_context
    from megakit.models import load_model_weights
    from megakit.testing import distributed_model_parallel_state

    sys.path.insert(0, str(HERE))  # a rank does not know the tests by their names
    Model, Config = attrgetter("LanguageModel", "LanguageConfig")(import_module("language"))
    Module = import_module("networks").Module
    with distributed_model_parallel_state(**layout):
        more = {"sequence_parallel": True} if "tensor_model_parallel_size" in layout else {}
        config = Config(seed=9, pipeline_dtype=torch.float32, **layout, **settings, **more)
        model = Model(config)
        load_model_weights(model, checkpoint)
        if get_rank() == 0:
            (to / "weights").mkdir(parents=True)
            write_context(to / "context", Module(config))
        barrier()
        dist_checkpointing.save(model.sharded_state_dict(prefix="module."), str(to / "weights"))


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, LLAMA], ids=str)
def test_checkpoints_of_other_layouts(settings: dict[str, Any], tmp_path: Path) -> None:
    from megakit.models import load_for_inference
    from megakit.testing import Ranks
    from tests.megakit.models.language import LanguageConfig

    trained = language_model(**settings)
    tokens = text(3, 10)
    expected = trained(tokens)
    one = save(tmp_path / "one", trained)
    layouts = [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}]
    with Ranks(2) as ranks:
        for layout in layouts:
            other = tmp_path / next(iter(layout))
            ranks.run(save_as, layout, settings, one, other)
            plain = load_for_inference(other, LanguageConfig(seed=5))
            torch.testing.assert_close(plain(tokens), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, LLAMA], ids=str)
def test_weights_of_the_plain_model_become_a_checkpoint(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    from megakit.models import checkpoint_from_weights
    from tests.megakit.models.language import LanguageConfig

    plain = load(save(tmp_path / "checkpoint", language_model(**settings)))
    config = LanguageConfig(seed=8, **settings)
    again = load(checkpoint_from_weights(plain.state_dict(), config, tmp_path / "imported"))
    assert torch.equal(again(text(2, 9)), plain(text(2, 9)))
