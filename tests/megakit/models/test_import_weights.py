"""Importing weights: what other programs wrote becomes a checkpoint, exactly or not at all."""

import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megakit.errors import UserError
from megakit.models.export import main as export
from megakit.models.import_weights import main
from tests.disk import Disk
from tests.scripts import REPOSITORY, run, run_script

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:Apex is not installed", "ignore:.*no manifest"),
]

NETWORKS = "tests.megakit.models.networks"


def net(**settings: Any) -> Any:
    from tests.megakit.models.networks import Net, NetConfig

    return Net(NetConfig(**settings))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if value is not None}


@pytest.fixture(scope="module")
def state(megatron: None) -> dict[str, Tensor]:
    """Of a model whose weights are not those that an import starts from."""
    return state_of(net(seed=3))


def convert(weights: Any, output: Path, config: Any = None, **options: Any) -> list[str]:
    """Calls the function; returns what it reported."""
    from megakit.models import checkpoint_from_weights
    from tests.megakit.models.networks import NetConfig

    told: list[str] = []
    options = {"report": told.append} | options
    assert checkpoint_from_weights(weights, config or NetConfig(), output, **options) == output
    return told


def refusal(weights: Any, folder: Path, config: Any = None, **options: Any) -> str:
    """Calls the function, which refuses and leaves nothing; returns its message."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as error:
        convert(weights, folder / "imported", config, **options)
    assert sorted(folder.rglob("*")) == before
    return str(error.value)


def imported(checkpoint: Path, **settings: Any) -> dict[str, Tensor]:
    """The weights of a fresh model that starts from a checkpoint, as in training."""
    from tests.megakit.models.networks import NetConfig

    config = NetConfig(seed=8, initial_ckpt_path=str(checkpoint), **settings)
    return state_of(config.configure_model())


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


# ---- Round trips -------------------------------------------------------------------------------


def test_exported_weights_come_back_bit_by_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from megakit.checkpoints import read_manifest, read_model_settings, verify
    from tests.megakit.models.networks import Net, NetConfig, save_checkpoint

    config = NetConfig(seed=3, hidden_size=12)
    trained = save_checkpoint(tmp_path / "trained", Net(config))
    one, two, made = (tmp_path / name for name in ("1.safetensors", "2.safetensors", "imported"))
    components = ("--components", NETWORKS)
    assert export([str(trained), "--safetensors", str(one), *components]) == 0
    options = ("--config", "NetConfig", "--set", "hidden_size=12")
    assert main([str(one), "--output", str(made), *options, *components]) == 0
    assert export([str(made), "--safetensors", str(two), *components]) == 0
    assert capsys.readouterr() == (f"{one}\n{made}\n{two}\n", "")
    assert_equal(load_file(two), load_file(one))
    assert_equal(load_file(two), state_of(Net(config)))
    manifest = verify(made)
    assert (manifest.stage, manifest.model, manifest.step) == ("imported", "Net", 0)
    assert manifest.run["weights"] == "1.safetensors"
    assert read_model_settings(made)["hidden_size"] == 12
    assert {path.name for path in tmp_path.iterdir()} == {
        *("trained", "imported", "1.safetensors", "2.safetensors")
    }
    named = tmp_path / "step=000070"
    convert(state_of(Net(config)), named, config)
    assert read_manifest(named).step == 70


def lightning(state: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "epoch": 3,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": {f"model.{name}": value for name, value in state.items()},
        "average": {f"model.{name}": value + 1 for name, value in state.items()},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{}]}],
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
        "hyper_parameters": {"widths": (8, 2), "name": "net"},
    }


#: What is saved, and the prefix that has to be reported.
FORMS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "plain": (dict, ""),
    "DDP": (lambda state: {f"module.{name}": v for name, v in state.items()}, "module."),
    "Lightning": (lightning, "model."),
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_torch(form: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    build, prefix = FORMS[form]
    torch.save(build(state), tmp_path / "weights.pt")
    told = convert(tmp_path / "weights.pt", tmp_path / "file")
    assert told == [
        f"{tmp_path}/weights.pt: the prefix {one} was removed from the names."
        for one in [prefix]
        if one
    ]
    assert_equal(imported(tmp_path / "file"), state)


def test_names_of_others(state: dict[str, Tensor], tmp_path: Path) -> None:
    """Modules and single tensors renamed, others left out."""
    old = {"first": "features.0", "second": "features.3", "head": "classifier.fc"}
    others = {"features.1.num_batches_tracked": torch.tensor(7), "ema.x": torch.ones(2)}
    for name, value in state.items():
        module, _, kind = name.partition(".")
        others[f"{old[module]}.{kind}"] = value
    others["gain"] = others.pop("classifier.fc.weight")
    names = {new: module for module, new in old.items() if module != "head"}
    names |= {"classifier.fc.": "head", "gain": "head.weight"}
    save_file(others, tmp_path / "o.safetensors")
    command = [str(tmp_path / "o.safetensors"), "--output", str(tmp_path / "made")]
    command += ["--config", "NetConfig", "--components", NETWORKS]
    command += ["--map", *(f"{one}={new}" for one, new in names.items())]
    assert main([*command, "--skip", "ema", "features.1.num_batches_tracked"]) == 0
    assert_equal(imported(tmp_path / "made"), state)


def test_a_transformer_of_torch_computes_the_same(tmp_path: Path) -> None:
    """With the fused matrix of queries, keys and values that the document describes."""
    from tests.megakit.models.blocks import Blocks, BlocksConfig

    heads, width, layers = 4, 16, 2
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "norm_first": True}
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, **options)
    norm = nn.LayerNorm(width)
    theirs = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False).eval()
    embedding, head = nn.Embedding(12, width), nn.Linear(width, 12)
    model = nn.ModuleDict({"embedding": embedding, "encoder": theirs, "head": head})
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    state = model.state_dict()
    names = {"encoder": "decoder", "encoder.norm": "decoder.final_layernorm"}
    for number in range(layers):
        old, new = f"encoder.layers.{number}", f"decoder.layers.{number}"
        for kind in ("weight", "bias"):
            rows = state.pop(f"{old}.self_attn.in_proj_{kind}")
            parts = [part.view(heads, width // heads, -1) for part in rows.chunk(3)]
            fused = torch.stack(parts, dim=1).reshape(rows.shape)
            state[f"{old}.self_attn.linear_qkv.{kind}"] = fused
        for one, other in (
            *(("norm1", "input_layernorm"), ("norm2", "pre_mlp_layernorm")),
            *(
                ("self_attn", "self_attention"),
                ("self_attn.out_proj", "self_attention.linear_proj"),
            ),
            *(("linear1", "mlp.linear_fc1"), ("linear2", "mlp.linear_fc2")),
        ):
            names[f"{old}.{one}"] = f"{new}.{other}"
    convert(state, tmp_path / "made", BlocksConfig(), names=names)
    ours = BlocksConfig(initial_ckpt_path=str(tmp_path / "made")).configure_model().eval()
    assert isinstance(ours, Blocks)
    tokens = torch.randint(12, (6, 5))
    torch.testing.assert_close(ours(tokens), head(theirs(embedding(tokens))), rtol=0, atol=1e-5)


# ---- What does not fit -------------------------------------------------------------------------


def test_one_table_of_all_problems(state: dict[str, Tensor], tmp_path: Path) -> None:
    wrong = dict(state)
    wrong["norm.num_batches_tracked"] = torch.tensor(3)
    wrong["fc.weight"] = wrong.pop("head.weight")
    wrong["first.bias"] = torch.ones(9)
    wrong["second.weight"] = torch.full((2, 8), float("nan"))
    message = refusal(wrong, tmp_path)
    assert message.splitlines() == [
        "the state dict: the tensors do not fit Net:",
        "  missing    head.weight               (3, 2) float32",
        "  left over  norm.num_batches_tracked  () int64",
        "  left over  fc.weight                 (3, 2) float32",
        "  unfit      first.bias                (8,) float32 in the model, (9,) float32 given",
        "  unfit      second.weight             has numbers that are NaN or infinite in float32",
        "Rename tensors or modules with --map OLD=NEW (in Python: names={OLD: NEW}), and leave "
        "them out with --skip NAME (in Python: skip=[NAME]).",
        "For a model of other sizes, give --set FIELD=VALUE (in Python: another config).",
    ]


def test_short_floats_are_converted_exactly(state: dict[str, Tensor], tmp_path: Path) -> None:
    short = {name: value.bfloat16() for name, value in state.items()}
    save_file(short, tmp_path / "short.safetensors")
    assert convert(tmp_path / "short.safetensors", tmp_path / "made") == []
    assert_equal(imported(tmp_path / "made"), {name: v.float() for name, v in short.items()})


def test_a_config_of_two_pipeline_stages_builds_all_layers(tmp_path: Path) -> None:
    """Megatron divides the layers of a transformer by the config's number of stages."""
    from tests.megakit.models.blocks import BlocksConfig

    state = state_of(BlocksConfig(seed=3).configure_model())
    two = BlocksConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    convert(state, tmp_path / "made", two)
    one = BlocksConfig(initial_ckpt_path=str(tmp_path / "made"))
    assert_equal(state_of(one.configure_model()), state)


# ---- Strangers' files --------------------------------------------------------------------------


class Attack:
    """Unpickling it creates a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_no_code_runs(
    variable: str | None,
    state: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    trace, path = tmp_path / "trace", tmp_path / "weights.pt"
    torch.save({**state, "x": Attack(trace)}, path)
    message = refusal(path, tmp_path)
    assert f"{path}: cannot be read (it needs posix.mkdir; only tensors and plain" in message
    assert "Give a safetensors file, or a file of torch.save(model.state_dict()" in message
    assert not trace.exists()


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("noise.pt", lambda state: bytes(range(256))),
        ("noise.safetensors", lambda state: bytes(range(256))),
        ("module.pt", lambda state: saved(nn.Linear(2, 2))),
        ("nothing.pt", lambda state: saved({})),
    ],
)
def test_files_without_a_state_dict(
    name: str, content: Callable[..., bytes], state: dict[str, Tensor], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content(state))
    message = refusal(tmp_path / name, tmp_path)
    assert message.startswith(f"{tmp_path}/{name}: cannot be read (")


# ---- The command -------------------------------------------------------------------------------


def test_options_that_cannot_be_used(
    state: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_file(state, tmp_path / "net.safetensors")
    mine, made = tmp_path / "mine", tmp_path / "made"
    mine.mkdir()
    command = (tmp_path / "net.safetensors", "--components", NETWORKS)
    elsewhere = ("--config", "X", "--components", "no.such", "--output", mine)
    nets = (*command, "--config", "NetConfig", "--output", made)
    cases: list[tuple[tuple[object, ...], list[str]]] = [
        (
            (tmp_path / "none", *elsewhere, "--map", "a=b", "a=c"),
            [
                *(f"{mine}: exists", "no.such: there is no such module"),
                *("none: there is no such file", "--map a: given twice"),
            ],
        ),
        (
            (*command, "--config", "Net", "--output", made),
            [f"--config Net: {NETWORKS} has no such class of a config", "NetConfig"],
        ),
        ((*nets, "--set", "width=7"), ["--set width: NetConfig has no such field"]),
        ((*nets, "--set", "hidden_size=wide"), ["--set: NetConfig refuses the values"]),
        (
            (*nets, "--set", "num_classes=7"),
            ["head.bias    (7,) float32 in the model, (3,) float32 given"],
        ),
    ]
    for arguments, problems in cases:
        assert main([*map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("import_weights: ")
        for problem in problems:
            assert problem in err
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "mine"}
    assert list(mine.iterdir()) == []


def test_it_is_complete_before_it_has_its_name(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".partial-made").mkdir()  # of a killed import
    (tmp_path / ".partial-made" / "rest").write_text("old")
    disk = Disk(monkeypatch)
    convert(state, tmp_path / "made")
    assert disk.events[-2:] == ["rename .partial-made to made", f"flush {tmp_path.name}"]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert not (tmp_path / "made" / "rest").exists()


# ---- A model of this project --------------------------------------------------------------------


DIGITS = ("--dataset", "digits", "--precision", "32")
SHORT = (*DIGITS, "--max-steps", 3, "--val-interval", 3)


def command(module: str, *arguments: object) -> str:
    """A command of the documents, in a process of its own."""
    program = (sys.executable, "-m", f"megakit.models.{module}")
    return run(*program, *arguments, cwd=REPOSITORY).output().strip()


@pytest.mark.long
def test_an_imported_classifier_predicts_the_same(tmp_path: Path) -> None:
    """Predictions of the imported checkpoint, by two pipeline stages."""
    runs, two = ("--output-dir", tmp_path / "runs"), ("--devices", 2, "--pipeline-parallel", 2)
    sizes = ("--hidden-size", 32)
    run_script("model_pretrain.py", *SHORT, *runs, *sizes).output()
    best = run_script("model_finetune.py", *SHORT, *runs).output().strip()
    weights, made = tmp_path / "weights.safetensors", tmp_path / "imported"
    command("export", best, "--safetensors", weights)
    config = ("--config", "ExampleFineTuneConfig", "--set", "hidden_size=32")
    assert command("import_weights", weights, "--output", made, *config) == str(made)
    predictions = [
        Path(run_script("model_predict.py", *DIGITS, *two, *more).output().strip()).read_text()
        for more in (
            ("--output-dir", tmp_path / "mine", "--checkpoint", made),
            ("--output-dir", tmp_path / "theirs", "--checkpoint", best),
        )
    ]
    assert predictions[0] == predictions[1]
