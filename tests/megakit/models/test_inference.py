"""Models for inference: the same outputs, no parallel state, and nobody else's is touched."""

import json
import shutil
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.errors import UserError
from tests.scripts import REPOSITORY, output_of

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:.*no manifest", "ignore:Apex is not installed"),
]


HERE = Path(__file__).resolve().parent


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


def test_hooks_of_replaced_layers_stay(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    """As of a low-rank correction of a frozen layer; without them the outputs would be wrong."""
    from tests.megakit.models.networks import Net

    plain, build = load(checkpoint), Net.__init__

    def build_with_hooks(self: Any, config: Any) -> None:
        build(self, config)
        self.first.register_forward_hook(lambda _, __, output: (output[0] + 1, output[1]))
        self.second.register_forward_pre_hook(
            lambda _, positional, named: ((positional[0] * 2,), named), with_kwargs=True
        )

    monkeypatch.setattr(Net, "__init__", build_with_hooks)
    hooked, x = load(checkpoint), torch.randn(5, 6)
    z, _ = plain.second((plain.first(x)[0] + 1).relu() * 2)
    torch.testing.assert_close(hooked(x), plain.head(z))


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

    def state() -> dict[str, Any]:
        return {name: vars(parallel_state)[name] for name in vars(parallel_state)}

    before, drawn = state(), torch.get_rng_state()
    load(checkpoint)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), drawn)
    shutil.copytree(checkpoint, checkpoint.with_name("broken"))
    (checkpoint.with_name("broken") / "weights" / ".metadata").unlink()
    with pytest.raises(Exception, match="metadata"):
        load(checkpoint.with_name("broken"))
    assert state() == before


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


def test_unknown_layers_are_listed_by_name(tmp_path: Path) -> None:
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megakit.models.plain import replace_parallel_layers
    from tests.megakit.models.blocks import Blocks, BlocksConfig

    model = Blocks(BlocksConfig(num_layers=1))
    model.decoder.layers[0].mlp.router = FusedLayerNorm.__new__(FusedLayerNorm)
    torch.nn.Module.__init__(model.decoder.layers[0].mlp.router)
    attention = model.decoder.layers[0].self_attention
    assert isinstance(attention.core_attention, DotProductAttention)
    attention.core_attention.scale_mask_softmax.window_size = (2, 0)
    attention.linear_proj.__class__ = type(
        "MyRowParallel",
        (type(attention.linear_proj),),
        {"forward": lambda self, x: (x, None), "__module__": "mine"},
    )
    with pytest.raises(UserError) as error:
        replace_parallel_layers(model)
    for layer in (
        "decoder.layers.0.mlp.router (FusedLayerNorm)",
        "decoder.layers.0.self_attention.core_attention (DotProductAttention)",
        "decoder.layers.0.self_attention.linear_proj (MyRowParallel)",
    ):
        assert layer in str(error.value)
    assert "linear_qkv" not in str(error.value)


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
    with pytest.raises(UserError, match=r"damaged: weights/.* bytes"):
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


def test_a_context_that_does_not_tell_the_class(checkpoint: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(checkpoint, tmp_path / "mine"))
    context = mine / "context" / "io.json"
    context.write_text(context.read_text().replace("fn_or_cls", "unknown"))
    with pytest.raises(UserError, match=r"io\.json: cannot be read \(KeyError: 'fn_or_cls'\)"):
        load(mine)


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


FRESH_PROCESS = """
import sys
from megakit.runtime import use_accelerator
use_accelerator("cpu")
import torch
from megatron.core import parallel_state
import blocks
from megakit.models import load_for_inference
for call in range(2):
    model = load_for_inference(sys.argv[1], blocks.BlocksConfig())
    assert not torch.distributed.is_initialized()
    assert not parallel_state.is_initialized()
    assert parallel_state._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE is None
example = torch.load(sys.argv[2])
output = model(example["input"])
print((output - example["output"]).abs().max().item())
"""


@pytest.mark.long
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    from tests.megakit.models.blocks import Blocks, BlocksConfig
    from tests.megakit.models.networks import save_checkpoint

    trained = Blocks(BlocksConfig()).eval()
    checkpoint = save_checkpoint(tmp_path / "checkpoint", trained)
    tokens = torch.randint(11, (6, 5))
    torch.save({"input": tokens, "output": trained(tokens).detach()}, tmp_path / "example.pt")
    given = (checkpoint, tmp_path / "example.pt")
    told = output_of(FRESH_PROCESS, *given, PYTHONPATH=f"{REPOSITORY}:{HERE}")
    assert float(told.splitlines()[-1]) < 1e-5


def in_a_running_job(checkpoint: Path, saved_here: Path) -> float | None:
    """How far the plain model is, on the one rank that loads it, from the job's own."""
    from megatron.core import dist_checkpointing, parallel_state
    from torch.distributed import barrier, get_rank

    from megakit.checkpoints.context import write_context
    from megakit.models import load_model_weights
    from megakit.testing import distributed_model_parallel_state

    sys.path.insert(0, str(HERE))  # a rank does not know the tests by their names
    Blocks, BlocksConfig = attrgetter("Blocks", "BlocksConfig")(import_module("blocks"))
    Module = import_module("networks").Module
    with distributed_model_parallel_state(tensor_model_parallel_size=2):
        model = Blocks(BlocksConfig(tensor_model_parallel_size=2)).eval()
        load_model_weights(model, checkpoint)
        if get_rank() == 0:
            (saved_here / "weights").mkdir(parents=True)
            write_context(saved_here / "context", Module(model.config))
        barrier()
        state = model.sharded_state_dict(prefix="module.")
        dist_checkpointing.save(state, str(saved_here / "weights"))
        before = dict(vars(parallel_state))
        plain = load(saved_here) if get_rank() == 1 else None  # alone
        assert vars(parallel_state) == before
        tokens = torch.arange(30).reshape(6, 5) % 12
        expected = model(tokens)
        return None if plain is None else (plain(tokens) - expected).abs().max().item()


@pytest.mark.long
def test_one_rank_of_a_job_loads_what_its_layout_saved(tmp_path: Path) -> None:
    from megakit.testing import Ranks
    from tests.megakit.models.blocks import Blocks, BlocksConfig
    from tests.megakit.models.networks import save_checkpoint

    trained = Blocks(BlocksConfig())
    checkpoint = save_checkpoint(tmp_path / "one", trained)
    with Ranks(2) as ranks:
        nothing, difference = ranks.run(in_a_running_job, checkpoint, tmp_path / "two")
    assert nothing is None
    assert difference is not None
    assert difference < 1e-5
