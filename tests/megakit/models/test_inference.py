"""Models for inference: the same outputs, no parallel state, and nobody else's is touched."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:.*no manifest", "ignore:Apex is not installed"),
]


def net(**settings: Any) -> Any:
    from tests.megakit.models.networks import Net, NetConfig

    return Net(NetConfig(**settings))


@pytest.fixture(scope="module")
def checkpoint(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another width and with another head than the config's defaults."""
    from tests.megakit.models.networks import save_checkpoint

    model = net(seed=1, hidden_size=12, num_classes=7, bf16=True)
    return save_checkpoint(tmp_path_factory.mktemp("net"), model)


def load(checkpoint: Path, config: Any = None, **options: Any) -> Any:
    from megakit.models import load_for_inference

    return load_for_inference(checkpoint, config, **options)


def test_the_model_is_plain_and_gives_the_same(checkpoint: Path) -> None:
    from tests.megakit.models.networks import weights

    trained = net(seed=1, hidden_size=12, num_classes=7)
    model = load(checkpoint)
    assert {type(layer).__module__.partition(".")[0] for layer in model.children()} <= {
        *("torch", "megakit")
    }
    assert isinstance(model.first, torch.nn.Linear)
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert weights(model).keys() == weights(trained).keys()
    x = torch.randn(5, 6)
    assert model(x).dtype == torch.float32
    torch.testing.assert_close(model(x), trained(x), rtol=0, atol=1e-6)


def test_a_checkpoint_that_others_configured_needs_the_config(checkpoint: Path) -> None:
    from tests.megakit.models.networks import NetConfig

    config = NetConfig(num_classes=7, tensor_model_parallel_size=2, num_attention_heads=2)
    before = vars(config).copy()
    assert torch.equal(load(checkpoint, config).head.weight, load(checkpoint).head.weight)
    assert vars(config) == before
    with pytest.raises(UserError, match=r"head\.weight: shape \(3, 2\) in the model, \(7, 2\)"):
        load(checkpoint, NetConfig())  # its override_parent_fields keeps its own number of classes


def test_random_numbers_and_parallel_state_stay_as_they_were(checkpoint: Path) -> None:
    from megatron.core import parallel_state

    before, drawn = dict(vars(parallel_state)), torch.get_rng_state()
    load(checkpoint)
    assert vars(parallel_state) == before
    assert torch.distributed.is_initialized()
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"is_causal": True, "normalization": "RMSNorm", "apply_query_key_layer_scaling": True},
        {"gated_linear_unit": True, "num_query_groups": 2, "add_bias_linear": False},
    ],
    ids=str,
)
def test_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    from megakit.models import load_model_weights
    from tests.megakit.models.blocks import Blocks, BlocksConfig
    from tests.megakit.models.networks import save_checkpoint

    trained = Blocks(BlocksConfig(**settings)).eval()
    checkpoint = save_checkpoint(tmp_path / "checkpoint", trained)
    model = load(checkpoint)
    fresh = Blocks(BlocksConfig(seed=2, **settings))
    assert load_model_weights(fresh, checkpoint) == []  # as Megatron itself loads
    for name, weight in trained.named_parameters():
        assert torch.equal(model.state_dict()[name], weight), name
        assert torch.equal(fresh.state_dict()[name], weight), name
    tokens = torch.randint(11, (6, 5))
    padding = torch.zeros(5, 1, 1, 6, dtype=torch.bool)
    padding[2, :, :, 4:] = True
    for mask in (None, padding):
        torch.testing.assert_close(model(tokens, mask), trained(tokens, mask), rtol=0, atol=1e-5)
    # The comparison is able to fail.
    assert not torch.allclose(model(tokens), model(tokens.roll(1, dims=1)), atol=1e-2)


def test_unknown_layers_are_listed_by_name() -> None:
    from megakit.models.plain import replace_parallel_layers
    from tests.megakit.models.blocks import Blocks, BlocksConfig

    model = Blocks(BlocksConfig(num_layers=1))
    attention = model.decoder.layers[0].self_attention
    attention.core_attention.scale_mask_softmax.window_size = (2, 0)
    with pytest.raises(UserError) as error:
        replace_parallel_layers(model)
    layer = "decoder.layers.0.self_attention.core_attention (DotProductAttention)"
    assert f"these layers cannot be replaced by torch layers: {layer}. Use" in str(error.value)


def test_no_checkpoint() -> None:
    with pytest.raises(UserError, match=r"nowhere: there is no such checkpoint\. Name"):
        load(Path("nowhere"))


def test_a_damaged_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    from megakit.checkpoints.manifest import Manifest, list_files, write_manifest

    mine = Path(shutil.copytree(checkpoint, tmp_path / "mine"))
    manifest = Manifest("train", "Net", "noise", 1, files=list_files(mine))
    write_manifest(mine, manifest)
    load(mine)
    weights = next((mine / "weights").glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"damaged: weights/.* was altered"):
        load(mine)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("strangers_code", "is not imported"),
        ("torch", "is not a subclass of MegatronBioNeMoTrainableModelConfig"),
    ],
)
def test_nothing_is_imported_because_a_checkpoint_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, reason: str
) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "strangers_code.py").write_text(f"open({str(trace)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    mine = Path(shutil.copytree(checkpoint, tmp_path / "mine"))
    context = mine / "context" / "io.json"
    text = context.read_text()
    named = '"module": "tests.megakit.models.networks", "name": "NetConfig"'
    assert named in text
    context.write_text(text.replace(named, f'"module": "{module}", "name": "Tensor"'))
    with pytest.raises(UserError, match=reason):
        load(mine)
    assert not trace.exists()


def test_settings_that_the_config_refuses(checkpoint: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(checkpoint, tmp_path / "mine"))
    context = mine / "context" / "io.json"
    content = json.loads(context.read_text())
    for item in content["objects"].values():
        for name, value in item["items"]:
            if name == "Attr(name='moe_expert_capacity_factor')":
                value["value"] = "nonsense"
    context.write_text(json.dumps(content))
    with pytest.raises(UserError, match="NetConfig refuses its settings"):
        load(mine)


def test_a_gpu_where_there_is_none(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="device cuda: this process computes on the CPU"):
        load(checkpoint, device="cuda")
