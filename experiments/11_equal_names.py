"""11. Equal layer names, and a list of what may be missing.

A classifier continues the trunk of a pretrained autoencoder, and has a new layer,
`digit_classifier`. What happens if nothing says that this layer is new? And what happens if the
classifier has another name for a layer of the trunk?

Megatron refuses a missing weight, so the config lists the new layers. megakit also refuses all
other differences, so a misspelled layer does not silently start from random weights.

Try: add "linear_1" to the prefixes in the last run. Which weights does the classifier start from?
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from experiments.training import train
from model_components import ExampleFineTuneConfig, ExampleFineTuneModel

CHECKPOINT = Path("checkpoint")


class Renamed(ExampleFineTuneModel):
    """The classifier with another name for linear1."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear_1 = self.linear1
        del self.linear1


def load(config: ExampleFineTuneConfig) -> str:
    """Pretrains, loads the checkpoint into the classifier, and compares the trunks."""
    pretrained = train(save_to=CHECKPOINT).weights
    config.initial_ckpt_path = str(CHECKPOINT)
    loaded = {k: v for k, v in config.configure_model().named_parameters() if k in pretrained}
    assert all(torch.equal(pretrained[name], weight) for name, weight in loaded.items())
    return f"loaded {', '.join(loaded)}"


def with_prefix() -> str:
    """The config lists the prefix of the new layer."""
    return load(
        ExampleFineTuneConfig(initial_ckpt_skip_keys_with_these_prefixes={"digit_classifier"})
    )


def without_prefix_by_megatron() -> str:
    """Megatron's `load` without a list of new layers."""
    train(save_to=CHECKPOINT)
    model = ExampleFineTuneConfig().configure_model()
    dist_checkpointing.load(model.sharded_state_dict(prefix="module."), str(CHECKPOINT / "weights"))
    return "loaded"


def without_prefix() -> str:
    """A config that lists no new layers."""
    return load(ExampleFineTuneConfig())


def without_equal_names() -> str:
    """A classifier that calls linear1 `linear_1`."""
    return load(
        ExampleFineTuneConfig(
            model_cls=Renamed, initial_ckpt_skip_keys_with_these_prefixes={"digit_classifier"}
        )
    )
