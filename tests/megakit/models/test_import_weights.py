"""Importing weights: what other programs wrote becomes a checkpoint, exactly or not at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megakit.errors import UserError
from megakit.models.export import main as export
from megakit.models.import_weights import main
from tests.megakit.poison import Bomb

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:Apex is not installed", "ignore:.*no manifest"),
]

NETWORKS = "tests.megakit.models.networks"


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if value is not None}


@pytest.fixture(scope="module")
def state(megatron: None) -> dict[str, Tensor]:
    """Of a model whose weights are not those that an import starts from."""
    from tests.megakit.models.networks import Net, NetConfig

    return state_of(Net(NetConfig(seed=3)))


def convert(weights: Any, output: Path, config: Any = None, **options: Any) -> list[str]:
    """Calls the function; returns what it reported."""
    from megakit.models import checkpoint_from_weights
    from tests.megakit.models.networks import NetConfig

    told: list[str] = []
    options = {"report": told.append} | options
    assert checkpoint_from_weights(weights, config or NetConfig(), output, **options) == output
    return told


def refusal(weights: Any, folder: Path, **options: Any) -> str:
    """Calls the function, which refuses and leaves nothing; returns its message."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as error:
        convert(weights, folder / "imported", **options)
    assert sorted(folder.rglob("*")) == before
    return str(error.value)


def assert_imported(checkpoint: Path, expected: Mapping[str, Tensor]) -> None:
    """Compares with the weights of a fresh model that starts from a checkpoint, as in training."""
    from tests.megakit.models.networks import NetConfig

    found = state_of(NetConfig(seed=8, initial_ckpt_path=str(checkpoint)).configure_model())
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)


def test_exported_weights_come_back_bit_by_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from megakit.checkpoints import read_model_settings, verify
    from tests.megakit.models.networks import Net, NetConfig, save_checkpoint

    config = NetConfig(seed=3, hidden_size=12)
    trained = save_checkpoint(tmp_path / "trained", Net(config))
    one, two, made = (tmp_path / name for name in ("1.safetensors", "2.safetensors", "step=000070"))
    components = ("--components", NETWORKS)
    assert export([str(trained), "--safetensors", str(one), *components]) == 0
    options = ("--config", "NetConfig", "--set", "hidden_size=12")
    assert main([str(one), "--output", str(made), *options, *components]) == 0
    assert export([str(made), "--safetensors", str(two), *components]) == 0
    assert capsys.readouterr() == (f"{one}\n{made}\n{two}\n", "")
    torch.testing.assert_close(load_file(two), state_of(Net(config)), rtol=0, atol=0)
    manifest = verify(made)
    assert (manifest.stage, manifest.model, manifest.step) == ("imported", "Net", 70)
    assert manifest.run == {"weights": "1.safetensors"}
    assert read_model_settings(made)["hidden_size"] == 12


def prefixed(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize("form", ["plain", "_orig_mod.module.", "lightning"])
def test_files_of_torch(form: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    prefix = {"plain": "", "lightning": "model."}.get(form, form)
    content: Any = prefixed(state, prefix)
    if form == "lightning":
        others = {"epoch": 3, "average": prefixed(state, "other."), "sizes": {"widths": (8, 2)}}
        content = {"state_dict": content, **others}
    torch.save(content, tmp_path / "weights.pt")
    told = convert(tmp_path / "weights.pt", tmp_path / "file")
    parts = {f"the prefix {part}. was removed from the names." for part in prefix.split(".")[:-1]}
    assert set(told) == parts
    assert_imported(tmp_path / "file", state)


def test_names_of_others(state: dict[str, Tensor], tmp_path: Path) -> None:
    """Modules and single tensors renamed, others left out; a prefix of the names without a rule."""
    old = {"first": "net.features.0", "second": "net.features.3", "head": "model.head"}
    others = {"net.features.1.num_batches_tracked": torch.tensor(7), "ema.x": torch.ones(2)}
    for name, value in state.items():
        module, _, kind = name.partition(".")
        others[f"{old[module]}.{kind}"] = value
    others["gain"] = others.pop("net.features.0.weight")
    save_file(others, tmp_path / "o.safetensors")
    command = [str(tmp_path / "o.safetensors"), "--output", str(tmp_path / "made")]
    command += ["--config", "NetConfig", "--components", NETWORKS, "--skip", "ema"]
    command += ["--map", "net.features.0=first", "net.features.3.=second.", "gain=first.weight"]
    assert main([*command, "--skip", "net.features.1.num_batches_tracked"]) == 0
    assert_imported(tmp_path / "made", state)
    convert(prefixed(state, "a.b."), tmp_path / "whole", names={"a.b": ""})
    assert_imported(tmp_path / "whole", state)
    twice = prefixed(state, "a.") | prefixed(state, "b.")
    assert "--map: several tensors get the same" in refusal(
        twice, tmp_path, names={"a": "", "b": ""}
    )


def test_one_error_lists_all_problems(state: dict[str, Tensor], tmp_path: Path) -> None:
    wrong = state | {"norm.steps": torch.tensor(3), "first.bias": torch.ones(9)}
    wrong["fc.weight"] = wrong.pop("head.weight")
    message = refusal(wrong, tmp_path)
    for part in (
        "the state dict: Error(s) in loading state_dict for Net:",
        'Missing key(s) in state_dict: "head.weight".',
        'Unexpected key(s) in state_dict: "norm.steps", "fc.weight".',
        "size mismatch for first.bias: copying a param with shape torch.Size([9])",
        "--map OLD=NEW (in Python: names={OLD: NEW})",
    ):
        assert part in message
    for bias in (torch.tensor([0.0, 1.0, torch.nan]), torch.full((3,), 1e300, dtype=torch.float64)):
        assert "NaN or infinite" in refusal(state | {"head.bias": bias}, tmp_path)
    quantised = state | {"head.bias": torch.ones(3, dtype=torch.int8)}
    assert "head.bias has numbers of torch.int8" in refusal(quantised, tmp_path)
    for rule in ({"names": {"heed": "head"}}, {"skip": ["heed"]}):
        assert "--map, --skip: heed: no tensor or module" in refusal(state, tmp_path, **rule)


def test_numbers_are_converted(state: dict[str, Tensor], tmp_path: Path) -> None:
    short = {name: value.bfloat16() for name, value in state.items()}
    assert convert(short, tmp_path / "short") == []
    assert_imported(tmp_path / "short", {name: value.float() for name, value in short.items()})
    (tmp_path / ".partial-long").mkdir()  # of a killed import
    (tmp_path / ".partial-long" / "rest").write_text("old")
    told = convert(state | {"head.bias": torch.rand(3).double() / 3}, tmp_path / "long")
    assert told == ["the numbers of 1 tensors were rounded to the model's type."]
    assert not (tmp_path / "long" / "rest").exists()


@pytest.mark.filterwarnings("ignore")
def test_files_without_weights(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code of theirs runs."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trace, path = tmp_path / "trace", tmp_path / "weights.pt"
    for content in ({**state, "x": Bomb(trace)}, nn.Linear(2, 2)):
        torch.save(content, path)
        assert refusal(path, tmp_path).startswith(
            f"{path}: cannot be read (it contains more than tensors and plain values). Give a"
        )
    assert not trace.exists()
    for name in ("noise.pt", "noise.safetensors"):
        (tmp_path / name).write_bytes(bytes(range(256)))
        assert f"{tmp_path}/{name}: cannot be read (" in refusal(tmp_path / name, tmp_path)
    assert "it has 2 state dicts" in refusal({"one": state, "two": state}, tmp_path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--config", "Net"], "--config Net: not a config of tests.megakit.models.networks. Name"),
        (["--set", "hidden_size=-8"], "NetConfig: it builds no model ("),
        (["--output", "mine"], "--output mine: exists"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used(
    options: list[str],
    problem: str,
    state: dict[str, Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(state, "net.safetensors")
    Path("mine").mkdir()
    usual = ["--config", "NetConfig", "--components", NETWORKS, "--output", "made"]
    assert main(["net.safetensors", *usual, *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("import_weights: "), problem in err) == ("", True, True), err
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "mine"}
