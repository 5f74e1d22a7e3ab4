"""Settings out of io.json: plain values as fiddle writes them, nothing imported, nothing called."""

import copy
import enum
import json
import os
import pickle
import time

import fiddle as fdl
import pytest
from fiddle.experimental import serialization

from megakit.checkpoints.context import read_model_settings
from megakit.errors import UserError
from tests.hostile import problem as problem_of
from tests.scripts import REPOSITORY, run_python


# What NeMo writes is a Config of a context with the module, and that one with its config.
class Context:
    def __init__(self, model=None, trainer=None, extra=None):
        raise AssertionError("was called")


class Module:
    def __init__(self, config=None, optimizer=None):
        raise AssertionError("was called")


class Settings:
    def __init__(self, **settings):
        raise AssertionError("was called")


class Color(enum.Enum):
    RED = "red"


def bomb():
    raise AssertionError("was called")


def write(checkpoint, content):
    (checkpoint / "context").mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (checkpoint / "context" / "io.json").write_text(text)
    return checkpoint


def as_fiddle_writes(settings):
    config = fdl.Config(Settings, **settings)
    return json.loads(
        serialization.dump_json(fdl.Config(Context, model=fdl.Config(Module, config=config)))
    )


def damage_of(checkpoint):
    return problem_of(read_model_settings, checkpoint)


PLAIN = {
    "hidden_size": 64,
    "dropout": 0.1,
    "name": "trunk",
    "bias": True,
    "seed": None,
    "layers": [1, 2, [3, "four"]],
    "shape": (1, 28, 28),
    "prefixes": {"digit_classifier"},
    "frozen": frozenset({1, 2}),
    "empty": [],
}


def test_plain_values_come_back(tmp_path):
    settings = read_model_settings(write(tmp_path, as_fiddle_writes(PLAIN)))
    assert settings == PLAIN
    assert {name: type(value) for name, value in settings.items()} == {
        name: type(value) for name, value in PLAIN.items()
    }


def test_one_value_in_two_places(tmp_path):
    shared = [1, 2]
    settings = {"first": shared, "second": shared}
    assert read_model_settings(write(tmp_path, as_fiddle_writes(settings))) == settings


def test_everything_else_is_passed_over(tmp_path):
    settings = {
        "kept": 1,
        "function": bomb,
        "kind": Settings,
        "color": Color.RED,
        "nested": fdl.Config(Module),
        "partial": fdl.Partial(bomb),
        "among_plain_ones": [1, bomb],
        "deep": (1, [2, (Color.RED,)]),
    }
    assert read_model_settings(write(tmp_path, as_fiddle_writes(settings))) == {"kept": 1}


def test_a_model_without_settings(tmp_path):
    assert read_model_settings(write(tmp_path, as_fiddle_writes({}))) == {}


def test_nothing_is_imported_or_called(tmp_path):
    """Modules that leave a trace when imported are named wherever the format allows it."""
    trace = tmp_path / "trace"
    (tmp_path / "trap.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).write_text('imported')\n"
        f"def spring(*args, **kwargs):\n    Path({str(trace)!r}).write_text('called')\n"
    )
    content = as_fiddle_writes({"kept": 1, "items": [1, 2]})
    trap = {"type": "pyref", "module": "trap", "name": "spring"}
    objects = content["objects"]
    objects["trap"] = {"type": trap, "items": [], "metadata": trap, "paths": []}
    model = objects[content["root"]["key"]]["items"][0][1]
    settings = objects[model["key"]]["items"][0][1]
    objects[settings["key"]]["items"] += [
        ["Attr(name='a')", {"type": "ref", "key": "trap"}],
        ["Attr(name='b')", trap],
        ["Attr(name='c')", {"type": trap, "items": []}],
        ["Attr(name='d')", {"type": "pickle", "value": pickle.dumps(trap).decode("latin1")}],
    ]
    for target in objects.values():
        target["metadata"] = trap
    write(tmp_path, content)
    code = (
        "import sys; from pathlib import Path\n"
        "from megakit.checkpoints.context import read_model_settings\n"
        "before = set(sys.modules)\n"
        "print(read_model_settings(Path(sys.argv[1])), set(sys.modules) - before)"
    )
    done = run_python("-c", code, tmp_path, PYTHONPATH=f"{REPOSITORY}:{tmp_path}")
    assert (done.out, done.err) == ("{'kept': 1, 'items': [1, 2]} set()\n", "")
    assert not trace.exists()


def test_no_context(tmp_path):
    problem = damage_of(tmp_path)
    assert str(tmp_path) in problem
    assert "context/io.json" in problem


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"{}", b'{"root": 1, "objects": {}}', b"\xff\xfe\x00"),
        *(b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b"[NaN]"),
    ],
    ids=lambda content: repr(content[:30]),
)
def test_damaged(tmp_path, content):
    path = write(tmp_path, "") / "context" / "io.json"
    path.write_bytes(content)
    problem = damage_of(tmp_path)
    assert str(path) in problem
    assert "damaged" in problem


def test_cut_anywhere(tmp_path):
    whole = json.dumps(as_fiddle_writes({"hidden_size": 64}))
    for length in range(0, len(whole), 7):
        assert "damaged" in damage_of(write(tmp_path, whole[:length]))


def test_a_container_that_holds_itself(tmp_path):
    content = as_fiddle_writes({"layers": [1]})
    (name,) = (key for key in content["objects"] if key.startswith("list"))
    content["objects"][name]["items"].append(["Index(index=1)", {"type": "ref", "key": name}])
    assert "damaged" in damage_of(write(tmp_path, content))


def test_shared_containers_are_counted_in_each_place(tmp_path):
    """Sixty lists of the one before, twice, are 2**60 values."""
    content = as_fiddle_writes({"layers": [1]})
    (name,) = (key for key in content["objects"] if key.startswith("list"))
    kind = content["objects"][name]["type"]
    for number in range(60):
        inner = {"type": "ref", "key": f"doubled_{number - 1}" if number else name}
        items = [["Index(index=0)", inner], ["Index(index=1)", inner]]
        content["objects"][f"doubled_{number}"] = {"type": kind, "items": items}
    config = next(value for key, value in content["objects"].items() if "settings" in key.lower())
    config["items"].append(["Attr(name='bomb')", {"type": "ref", "key": "doubled_59"}])
    assert "more than 100,000 values" in damage_of(write(tmp_path, content))


def test_a_list_as_json_has_it_is_no_setting(tmp_path):
    content = as_fiddle_writes({"kept": 1, "raw": 2})
    config = next(value for key, value in content["objects"].items() if "settings" in key.lower())
    (raw,) = (pair for pair in config["items"] if pair[0] == "Attr(name='raw')")
    raw[1] = [[["anything"]]]
    assert read_model_settings(write(tmp_path, content)) == {"kept": 1}


@pytest.mark.parametrize("name", ["io.json", "model.yaml", "a.pkl"])
def test_files_that_are_too_large(tmp_path, name):
    write(tmp_path, as_fiddle_writes({"kept": 1}))
    with (tmp_path / "context" / name).open("r+b" if name == "io.json" else "wb") as file:
        file.truncate(1 << 30)  # a hole: it takes no room on the disk
    assert f"{tmp_path}/context/{name}: cannot be read (1,073,741,824" in damage_of(tmp_path)


@pytest.mark.parametrize("name", ["io.json", "model.yaml", "8c1f2e"])
def test_pipes_are_refused_at_once(tmp_path, name):
    write(tmp_path, as_fiddle_writes({"kept": 1}))
    (tmp_path / "context" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "context" / name)
    assert f"context/{name} is neither a file nor a folder" in damage_of(tmp_path)


class Poison:
    def __reduce__(self):
        return os.path.exists, ("/",)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.pkl", pickle.dumps(Poison(), 0), "genericpath.exists"),
        ("a.pickle", pickle.dumps(Poison(), 1), "genericpath.exists"),
        ("8c1f2e", pickle.dumps(Poison(), 2), "genericpath.exists"),
        ("below/8c1f2e", pickle.dumps(Poison(), 4), "genericpath.exists"),
        ("a.pkl", b"(ios.path\nexists\n.", "os.path.exists"),
        ("a.pkl", b"cposix\nsystem\n.", "posix.system"),
        ("a.pkl", b"cbuiltins\neval\n.", "builtins.eval"),
        ("a.yaml", b"x: !!python/name:os.system\n", "!!python/name:os.system"),
        ("a.yml", b"_target_: os.path.exists\n", "os.path.exists"),
    ],
)
def test_what_loading_a_file_beside_it_would_run_is_named(tmp_path, name, content, named):
    path = write(tmp_path, as_fiddle_writes({"kept": 1})) / "context" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert f"{path}: the file is unsafe: it names {named}." in damage_of(tmp_path)


@pytest.mark.parametrize("protocol", [2, 4])  # the first looks up methods with `getattr`
def test_what_is_harmless_in_a_file_beside_it(tmp_path, protocol):
    content = {"method": Harmless.method, "path": tmp_path, "color": Color.RED}
    write(tmp_path, as_fiddle_writes({"kept": 1}))
    (tmp_path / "context" / "8c1f2e").write_bytes(pickle.dumps(content, protocol))
    (tmp_path / "context" / "a.yaml").write_text("_target_: megakit.models.Net\n")
    assert read_model_settings(tmp_path) == {"kept": 1}


class Harmless:
    def method(self):
        raise AssertionError("was called")


def test_it_takes_milliseconds(tmp_path):
    """A resumption begins with it, before torch is imported."""
    write(tmp_path, as_fiddle_writes(PLAIN))
    began = time.perf_counter()
    for _ in range(10):
        read_model_settings(tmp_path)
    assert time.perf_counter() - began < 10


def test_a_set_of_lists(tmp_path):
    content = as_fiddle_writes({"layers": [1], "names": {"a"}})
    names = {key.rpartition("_")[0]: key for key in content["objects"]}
    content["objects"][names["set"]]["items"] = [
        ["SetElement()", {"type": "ref", "key": names["list"]}]
    ]
    assert "damaged" in damage_of(write(tmp_path, content))


def places(content, path=()):
    """The way to every value in a JSON document."""
    children = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


@pytest.mark.parametrize("put", ["nothing", None, 7, "text", [], {}], ids=str)
def test_any_part_missing_or_of_another_type(tmp_path, put):
    """Settings or a message for the user; never anything else."""
    whole = as_fiddle_writes({"hidden_size": 64, "layers": [1, (2,)], "names": {"a"}})
    for *way, last in places(whole):
        content = copy.deepcopy(whole)
        parent = content
        for key in way:
            parent = parent[key]
        if put == "nothing":
            del parent[last]
        else:
            parent[last] = put
        try:
            settings = read_model_settings(write(tmp_path, content))
        except UserError as error:
            understood = "damaged" in str(error)
        except Exception as error:
            pytest.fail(f"{error!r} for {put!r} at {[*way, last]}")
        else:
            understood = isinstance(settings, dict)
        assert understood
