"""Settings out of io.json: plain values as fiddle writes them, nothing imported, nothing called."""

import enum
import json
import pickle

import fiddle as fdl
import pytest
from fiddle.experimental import serialization

from megakit.checkpoints.model_settings import read_model_settings
from tests.refusals import problem as problem_of
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


def test_plain_values_come_back_and_everything_else_is_passed_over(tmp_path):
    plain = {"size": 64, "dropout": 0.1, "name": "trunk", "bias": True, "seed": None, "empty": []}
    plain |= {"layers": [1, [2, "four"]], "shape": (1, 28), "ids": {"a"}, "more": frozenset({1})}
    others = {"function": bomb, "kind": Settings, "nested": fdl.Config(Module)}
    others |= {"partial": fdl.Partial(bomb), "deep": (1, [2, (Color.RED,)])}
    settings = read_model_settings(write(tmp_path, as_fiddle_writes(plain | others)))
    assert settings == plain
    assert [*map(type, settings.values())] == [*map(type, plain.values())]


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
        "from megakit.checkpoints.model_settings import read_model_settings\n"
        "before = set(sys.modules)\n"
        "print(read_model_settings(Path(sys.argv[1])), set(sys.modules) - before)"
    )
    done = run_python("-c", code, tmp_path, PYTHONPATH=f"{REPOSITORY}:{tmp_path}")
    assert (done.out, done.err) == ("{'kept': 1, 'items': [1, 2]} set()\n", "")
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [None, b"{}", b'{"root": 1, "objects": {}}', b"\xff\xfe\x00", b"[" * 100_000],
    ids=lambda content: repr(content)[:30],
)
def test_missing_or_damaged(tmp_path, content):
    path = write(tmp_path, "") / "context" / "io.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert f"{path}: cannot be read" in problem_of(read_model_settings, tmp_path)
