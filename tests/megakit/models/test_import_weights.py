"""Importing weights: what other programs wrote becomes a checkpoint, exactly or not at all."""

import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megakit.errors import UserError
from megakit.models.export import main as export
from megakit.models.import_weights import main
from megakit.models.renaming import assign
from tests.disk import Disk
from tests.scripts import REPOSITORY, run, run_python, run_script

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:Apex is not installed", "ignore:.*no manifest"),
]

HERE = Path(__file__).resolve().parent
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
    "parameters": (lambda state: {n: nn.Parameter(v) for n, v in state.items()}, ""),
    "of Megatron": (lambda state: {**state, "first._extra_state": None}, ""),
    "DDP": (lambda state: {f"module.{name}": v for name, v in state.items()}, "module."),
    "compiled": (lambda s: {f"module._orig_mod.{n}": v for n, v in s.items()}, "module._orig_mod."),
    "Lightning": (lightning, "model."),
    "with a step": (lambda state: {**state, "step": 7, "first._extra_state": {}}, ""),
    "with an optimizer": (lambda state: {"model": state, "step": 7, "optimizer": {}}, ""),
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
    convert(build(state), tmp_path / "memory")
    for name in ("file", "memory"):
        assert_equal(imported(tmp_path / name), state)


def test_other_files_of_torch(state: dict[str, Tensor], tmp_path: Path) -> None:
    """A module's own state dict, which has an attribute; and the format before torch 1.6."""
    layers = nn.ModuleDict({"first": nn.Linear(6, 8), "second": nn.Linear(8, 2)})
    layers["head"] = nn.Linear(2, 3)
    layers.load_state_dict(state)
    assert hasattr(layers.state_dict(), "_metadata")
    for is_zip in (True, False):
        path = tmp_path / f"{is_zip}.pt"
        torch.save(layers.state_dict(), path, _use_new_zipfile_serialization=is_zip)
        convert(path, tmp_path / str(is_zip))
        assert_equal(imported(tmp_path / str(is_zip)), state)


# ---- Names -------------------------------------------------------------------------------------


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


def test_the_root_can_be_renamed(state: dict[str, Tensor], tmp_path: Path) -> None:
    """Of two copies below one another, the user chooses; and a prefix can be added."""
    copies = {f"student.{n}": v for n, v in state.items()}
    copies |= {f"teacher.{n}": v + 1 for n, v in state.items()}
    assert "The modules student, teacher fit equally well." in refusal(copies, tmp_path)
    assert "left over" in refusal(copies, tmp_path, names={"student": ""})
    choices: list[dict[str, Any]] = [{}, {"names": {"student": ""}}]
    for number, choice in enumerate(choices):
        convert(copies, tmp_path / str(number), skip=["teacher"], **choice)
        assert_equal(imported(tmp_path / str(number)), state)
    head = {name.removeprefix("head."): v for name, v in state.items() if name.startswith("head.")}
    rest = {name: value for name, value in state.items() if not name.startswith("head.")}
    names = {"": "head", "first": "first", "second": "second"}
    convert(head | rest, tmp_path / "added", names=names)
    assert_equal(imported(tmp_path / "added"), state)


PARTS = st.sampled_from(["a", "b", "layers", "0", "1", "weight"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


@given(st.sets(NAMES, min_size=1), st.lists(PARTS, max_size=3).map(".".join))
def test_a_prefix_of_all_names_is_found_or_refused(wanted: set[str], module: str) -> None:
    prefix = f"{module}." if module else ""
    moved = [prefix + name for name in wanted]
    found = assign(moved, wanted, {}, ())
    assert not found.left_over or found.sources.keys() != wanted or found.problems
    if sorted(found.sources) == sorted(wanted):
        assert found.sources == {name: [prefix + name] for name in wanted}
    by_rule = assign(moved, wanted, {module: ""}, ())
    assert by_rule.sources == {name: [prefix + name] for name in wanted}
    assert (by_rule.left_over, by_rule.problems) == ([], [])


@given(st.dictionaries(NAMES, NAMES), st.sets(NAMES, min_size=1))
def test_every_name_is_used_once_or_left_over(rules: dict[str, str], given: set[str]) -> None:
    found = assign(given, given, rules, ())
    used = [name for sources in found.sources.values() for name in sources]
    assert sorted([*used, *found.left_over]) == sorted(given)
    assert found.sources.keys() <= given


def test_the_longest_rule_applies_and_names_end_at_points() -> None:
    names = ["a.b.x", "a.c", "ab.c", "a"]
    rules = {"a": "x", "a.b": "y", "ab": "z"}
    found = assign(names, ["y.x", "x.c", "z.c", "x"], rules, ())
    assert found.sources == {"y.x": ["a.b.x"], "x.c": ["a.c"], "z.c": ["ab.c"], "x": ["a"]}
    assert assign(names, names, {}, ["a"]).sources == {"ab.c": ["ab.c"]}


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
    wrong["first.weight"] = torch.ones(8, 6, dtype=torch.int32)
    wrong["second.weight"] = torch.full((2, 8), float("nan"))
    wrong["second.bias"] = torch.ones(2).to_sparse()
    wrong["gain"] = torch.ones(3)
    message = refusal(wrong, tmp_path, names={"gain": "head.bias", "nothing": "x"}, skip=["no"])
    assert message.splitlines() == [
        "the state dict: the tensors do not fit Net:",
        "  missing    head.weight               (3, 2) float32",
        "  left over  norm.num_batches_tracked  () int64",
        "  left over  fc.weight                 (3, 2) float32",
        "  unfit      first.weight              (8, 6) float32 in the model, (8, 6) int32 given",
        "  unfit      first.bias                (8,) float32 in the model, (9,) float32 given",
        "  unfit      second.weight             has numbers that are NaN or infinite in float32",
        "  unfit      second.bias               given as Tensor (torch.sparse_coo), not as a dense "
        "tensor",
        "  unfit      head.bias                 given by head.bias and gain",
        "--map nothing: there is no tensor and no module of this name.",
        "--skip no: there is no tensor and no module of this name.",
        "Rename tensors or modules with --map OLD=NEW (in Python: names={OLD: NEW}), and leave "
        "them out with --skip NAME (in Python: skip=[NAME]).",
        "For a model of other sizes, give --set FIELD=VALUE (in Python: another config).",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_short_floats_are_converted_exactly(
    dtype: torch.dtype, state: dict[str, Tensor], tmp_path: Path
) -> None:
    short = {name: value.to(dtype) for name, value in state.items()}
    save_file(short, tmp_path / "short.safetensors")
    assert convert(tmp_path / "short.safetensors", tmp_path / "made") == []
    assert_equal(imported(tmp_path / "made"), {name: v.float() for name, v in short.items()})


def test_rounding_is_reported(state: dict[str, Tensor], tmp_path: Path) -> None:
    exact = {name: value.double() for name, value in state.items()}
    assert convert(exact, tmp_path / "exact") == []
    (told,) = convert(
        {**exact, "head.bias": exact["head.bias"] * (1 + 1e-12)}, tmp_path / "rounded"
    )
    assert "the numbers of 1 tensors were rounded" in told
    assert "head.bias from float64 to float32" in told
    for name in ("exact", "rounded"):
        assert_equal(imported(tmp_path / name), state)
    too_large = {**exact, "head.bias": exact["head.bias"] + 1e300}
    assert "NaN or infinite in float32" in refusal(too_large, tmp_path)


class TestBuffersAndSharing:
    """A model with counters, and with one tensor under two names."""

    @pytest.fixture
    def config(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from tests.megakit.models.networks import Net, NetConfig

        build = Net.__init__

        def build_more(model: Any, config: Any) -> None:
            build(model, config)
            model.norm = nn.BatchNorm1d(2)
            model.tied = nn.Linear(2, 3)
            model.tied.weight = model.head.weight

        monkeypatch.setattr(Net, "__init__", build_more)
        return NetConfig()

    @pytest.fixture
    def state(self, config: Any) -> dict[str, Tensor]:
        state = state_of(net(seed=5))
        state["norm.running_mean"] += 2
        state["norm.num_batches_tracked"] += 7
        return state

    def test_are_imported(self, config: Any, state: dict[str, Tensor], tmp_path: Path) -> None:
        assert state["norm.num_batches_tracked"].shape == ()
        convert(state, tmp_path / "made", config)
        assert_equal(imported(tmp_path / "made"), state)

    @pytest.mark.parametrize("left_out", ["head.weight", "tied.weight"])
    def test_one_name_is_enough(
        self, config: Any, state: dict[str, Tensor], tmp_path: Path, left_out: str
    ) -> None:
        """As safetensors files store them."""
        expected = dict(state)
        del state[left_out]
        convert(state, tmp_path / "made", config)
        assert_equal(imported(tmp_path / "made"), expected)

    def test_two_values_are_refused(
        self, config: Any, state: dict[str, Tensor], tmp_path: Path
    ) -> None:
        state["tied.weight"] = state["tied.weight"] + 1
        message = refusal(state, tmp_path, config)
        assert "head.weight  shared with another tensor of the model" in message

    def test_integers_are_not_converted(
        self, config: Any, state: dict[str, Tensor], tmp_path: Path
    ) -> None:
        for number in (torch.tensor(7, dtype=torch.int32), torch.tensor(7.0), torch.tensor(7j)):
            state["norm.num_batches_tracked"] = number
            kind = str(number.dtype).removeprefix("torch.")
            message = refusal(state, tmp_path, config)
            assert f"norm.num_batches_tracked  () int64 in the model, () {kind} given" in message


def test_settings_of_the_config_are_kept(state: dict[str, Tensor], tmp_path: Path) -> None:
    """Another layout or precision builds the same model; the user's config is not changed."""
    from megakit.checkpoints import read_model_settings
    from tests.megakit.models.networks import NetConfig

    config = NetConfig(
        tensor_model_parallel_size=2, num_attention_heads=2, bf16=True, params_dtype=torch.bfloat16
    )
    config.initial_ckpt_path = str(tmp_path / "none")
    before = dict(vars(config))
    convert(state, tmp_path / "made", config)
    assert vars(config) == before
    assert_equal(imported(tmp_path / "made", num_attention_heads=2), state)
    assert read_model_settings(tmp_path / "made")["num_attention_heads"] == 2


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


class Registered:
    """A class that some library has registered with torch's unpickler."""


@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_no_code_runs(
    variable: str | None,
    state: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    trace = tmp_path / "trace"
    for is_zip in (True, False):
        path = tmp_path / f"{is_zip}.pt"
        torch.save({**state, "x": Attack(trace)}, path, _use_new_zipfile_serialization=is_zip)
        message = refusal(path, tmp_path)
        assert f"{path}: cannot be read (it needs posix.mkdir; only tensors and plain" in message
        assert "Give a safetensors file, or a file of torch.save(model.state_dict()" in message
    assert not trace.exists()


def test_registered_classes_are_refused_and_stay_registered(
    state: dict[str, Tensor], tmp_path: Path
) -> None:
    torch.save({**state, "x": Registered()}, tmp_path / "weights.pt")
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([Registered]):
        torch.load(tmp_path / "weights.pt", weights_only=True)
        assert "Registered; only tensors and plain values are read" in refusal(
            tmp_path / "weights.pt", tmp_path
        )
        assert set(torch.serialization.get_safe_globals()) == {*before, Registered}


def scripted() -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)
    return file.getvalue()


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.pt", lambda state: b""),
        ("noise.pt", lambda state: bytes(range(256))),
        ("noise.safetensors", lambda state: bytes(range(256))),
        ("half.pt", lambda state: saved(state)[:-900]),
        ("module.pt", lambda state: saved(nn.Linear(2, 2))),
        ("script.pt", lambda state: scripted()),
        ("list.pt", lambda state: saved(list(state.values()))),
        ("numbers.pt", lambda state: saved({0: torch.ones(2)})),
        ("nothing.pt", lambda state: saved({})),
        ("two.pt", lambda state: saved({"model": state, "ema": state})),
    ],
)
def test_files_without_a_state_dict(
    name: str, content: Callable[..., bytes], state: dict[str, Tensor], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content(state))
    message = refusal(tmp_path / name, tmp_path)
    assert message.startswith(f"{tmp_path}/{name}: cannot be read (")
    if name == "two.pt":
        assert "2 state dicts instead of one; its entries: model, ema" in message


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.pt")
    for path in (tmp_path / "fifo.pt", tmp_path):
        assert "not a regular file" in refusal(path, tmp_path)
    assert "No such file" in refusal(tmp_path / "none.pt", tmp_path)
    assert "the state dict: cannot be read (it has 0 state dicts" in refusal({}, tmp_path)


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
            (*command, "--config", "X", "--output", tmp_path / "no" / "made"),
            [f"there is no folder {tmp_path / 'no'}. Make it first"],
        ),
        (
            (*command, "--config", "Net", "--output", made),
            [f"--config Net: {NETWORKS} has no such class of a config", "NetConfig"],
        ),
        ((*nets, "--set", "width=7"), ["--set width: NetConfig has no such field"]),
        ((*nets, "--set", "hidden_size=wide"), ["--set: NetConfig refuses the values"]),
        ((*nets, "--set", "hidden_size=-1"), ["NetConfig cannot build its model"]),
        ((*nets, "--set", "model_cls=Net"), ["--set model_cls: is a class"]),
        (
            (*nets, "--map", "nothing=first"),
            ["the names in the options are wrong:", "--map nothing: there is no tensor"],
        ),
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


@pytest.mark.parametrize("arguments", [["--map", "a"], ["--set", "a"]])
def test_a_pair_without_its_sign(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["weights.pt", "--config", "X", "--output", "y", *arguments])
    assert exit_.value.code == 2
    assert arguments[0] in capsys.readouterr().err


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


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
from megakit.models.import_weights import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_without_space(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "net.safetensors")
    command = (tmp_path / "net.safetensors", "--components", "networks", "--config", "NetConfig")
    output = ("--output", tmp_path / "made")
    done = run_python("-c", LIMITED, *command, *output, PYTHONPATH=f"{REPOSITORY}:{HERE}")
    assert done.status == 1, done.err
    assert f"import_weights: cannot write {tmp_path}/made: " in done.err
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


# ---- Models of this project, under every layout ------------------------------------------------


DIGITS = ("--dataset", "digits", "--precision", "32")
SHORT = (*DIGITS, "--max-steps", 3, "--val-interval", 3)


def command(module: str, *arguments: object) -> str:
    """A command of the documents, in a process of its own."""
    program = (sys.executable, "-m", f"megakit.models.{module}")
    return run(*program, *arguments, cwd=REPOSITORY).output().strip()


def round_trip(checkpoint: object, folder: Path, config: str, *options: object) -> Path:
    """Exports, imports and exports again; all tensors of both files are equal."""
    one, two, made = folder / "1.safetensors", folder / "2.safetensors", folder / "imported"
    components = options[:2]
    command("export", checkpoint, "--safetensors", one, *components)
    told = command("import_weights", one, "--config", config, "--output", made, *options)
    assert told == str(made)
    command("export", made, "--safetensors", two, *components)
    found, expected = load_file(two), load_file(one)
    assert [(name, value.numpy().tobytes()) for name, value in sorted(found.items())] == [
        (name, value.numpy().tobytes()) for name, value in sorted(expected.items())
    ]
    return made


@pytest.mark.long
def test_an_imported_classifier_predicts_the_same(tmp_path: Path) -> None:
    """Predictions of the imported checkpoint, by two pipeline stages."""
    runs, two = ("--output-dir", tmp_path / "runs"), ("--devices", 2, "--pipeline-parallel", 2)
    sizes = ("--hidden-size", 32)
    run_script("model_pretrain.py", *SHORT, *runs, *sizes).output()
    best = run_script("model_finetune.py", *SHORT, *runs).output().strip()
    options = ("--components", "model_components", "--set", "hidden_size=32")
    made = round_trip(best, tmp_path, "ExampleFineTuneConfig", *options)
    predictions = [
        Path(run_script("model_predict.py", *DIGITS, *two, *more).output().strip()).read_text()
        for more in (
            ("--output-dir", tmp_path / "mine", "--checkpoint", made),
            ("--output-dir", tmp_path / "theirs", "--checkpoint", best),
        )
    ]
    assert predictions[0] == predictions[1]


def differences(one: Path, other: Path | None, layout: Any) -> tuple[list[str], int]:
    """In a rank: names of tensors of its shard that differ, and how many tensors it has."""
    from examples.vit.vit_components import VitPretrainConfig
    from megakit.testing import distributed_model_parallel_state

    with distributed_model_parallel_state(accelerator="cpu", **layout):
        shards = []
        for path in (one, other):
            start = str(path) if path else None
            config = VitPretrainConfig(
                initial_ckpt_path=start, pipeline_dtype=torch.float32, **layout
            )
            shards.append(dict(config.configure_model().named_parameters()))
    assert shards[0].keys() == shards[1].keys()
    different = [name for name, shard in shards[0].items() if not shards[1][name].equal(shard)]
    return different, len(shards[0])


@pytest.mark.long
def test_ranks_load_the_shards_of_the_original(tmp_path: Path) -> None:
    """A transformer, whose layers Megatron stores as one tensor, and whose QKV is one matrix."""
    from megakit.testing import Ranks

    runs = ("--output-dir", tmp_path / "runs")
    trained = run_script("examples/vit/model_pretrain.py", *SHORT, *runs).output().strip()
    options = ("--components", "examples.vit.vit_components")
    made = round_trip(trained, tmp_path, "VitPretrainConfig", *options)
    numbers = []
    with Ranks(2) as ranks:
        for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            for different, number in ranks.run(differences, made, Path(trained), {size: 2}):
                assert different == []
                numbers.append(number)
            for different, _ in ranks.run(differences, made, None, {size: 2}):
                assert different, "random weights are others, so the comparison can fail"
    assert numbers[0] == numbers[1] > max(numbers[2:])
    two = ("--devices", 2, "--tensor-parallel", 2)
    more = (*SHORT, *runs, *two, "--checkpoint", made)
    run_script("examples/vit/model_finetune.py", *more).output()
