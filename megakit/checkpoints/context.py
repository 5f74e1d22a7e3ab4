"""Writes a checkpoint's context, the settings of its model in NeMo's format; reads it safely."""

import contextlib
import json
import pickletools
import re
import sys
from pathlib import Path
from typing import Any

from megakit.checkpoints.folders import CONTEXT
from megakit.checkpoints.manifest import refuse_links
from megakit.errors import UserError
from megakit.runtime.foreign_files import JSON_BYTES, read_regular_file, reading

_USE_ANOTHER = "It is damaged or not to be trusted. Use another checkpoint."
#: The largest accepted number of values in settings. A shared value counts once per use.
_MAX_VALUES = 100_000
#: Size limit of pickle and yaml files next to io.json; larger files are refused.
_LOOKED_THROUGH_BYTES = 4 << 20
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

#: Standard-library modules that settings may use. All other standard-library modules are refused.
_HARMLESS = {
    *("collections", "dataclasses", "datetime", "decimal", "enum", "fractions", "numbers"),
    *("pathlib", "signal", "types", "typing"),
}
_HARMLESS_BUILTINS = {
    *("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "set"),
    *("slice", "str", "tuple", "type", "NoneType", "Ellipsis"),
}


def write_context(folder: Path, module: Any) -> None:
    """Writes a Lightning module's settings for NeMo's `io.load_context(..., "model")`.

    The trainer is left out, because NeMo would pickle its callbacks, strategy and plugins.
    """
    from nemo.lightning.io.pl import TrainerContext

    TrainerContext(model=module, trainer=None, extra={}).io_dump(folder, yaml_attrs=[])


def read_model_settings(checkpoint: Path) -> dict[str, Any]:
    """Returns the settings of the model's config at the time of the save.

    NeMo's own reader imports and calls everything that the file names. This reader imports and
    calls nothing. It accepts numbers, strings, booleans, None and containers of these types, and
    skips other values. Pickle and yaml files next to io.json are searched, but never loaded.

    Args:
        checkpoint: The folder that contains `context/`.

    Returns:
        The values by field name of the config.

    Raises:
        UserError: There is no context, or the context cannot be parsed. Or the context names
            something that settings do not need, such as a function of the module `os`.
    """
    path = checkpoint / CONTEXT / "io.json"
    with reading(path, _USE_ANOTHER):
        refuse_links(checkpoint)
        content = _content(checkpoint)
        objects = content["objects"]
        config = _items(
            objects, _items(objects, _items(objects, content["root"])["model"])["config"]
        )
        budget = _Budget()
        values = {name: _plain(objects, item, budget) for name, item in config.items()}
        _refuse_strange_files(path.parent)
    return {name: value for name, value in values.items() if value is not _NOT_PLAIN}


def _content(checkpoint: Path) -> dict[str, Any]:
    """Returns the content of io.json; refuses names that settings do not need."""
    path = checkpoint / CONTEXT / "io.json"
    if not path.is_file():
        raise UserError(f"{checkpoint}: has no {CONTEXT}/io.json with its model's settings.")
    content = json.loads(read_regular_file(path, JSON_BYTES))
    if type(content) is not dict:
        raise ValueError(f"it holds a {type(content).__name__}")
    if strange := sorted(set(_strange_names(content))):
        raise ValueError(f"it names {', '.join(strange)}, which no settings need")
    return content


def read_config_class(checkpoint: Path) -> tuple[str, str]:
    """Returns module and name of the class of a checkpoint's config, without importing it.

    Raises:
        UserError: `read_model_settings` raises it, or the context does not name the class.
    """
    read_model_settings(checkpoint)  # refuses damaged or unsafe files
    with reading(checkpoint / CONTEXT / "io.json", _USE_ANOTHER):
        content = _content(checkpoint)
        objects = content["objects"]
        module = _items(objects, content["root"])["model"]
        config = objects[_items(objects, module)["config"]["key"]]
        told = _items(objects, config["metadata"])["fn_or_cls"]
        return str(told["module"]), str(told["name"])


_NOT_PLAIN = object()


class _Budget:
    """Limits the number of values: in a small file, 60 nested `[x, x]` mean 2**60 values."""

    def __init__(self) -> None:
        self.left = _MAX_VALUES

    def spend(self) -> None:
        """Counts one value."""
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"its settings have more than {_MAX_VALUES:,} values")


def _items(objects: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a referenced object; fiddle writes names as `Attr(name='...')`."""
    pairs = objects[reference["key"]]["items"]
    return {key.removeprefix("Attr(name='").removesuffix("')"): item for key, item in pairs}


def _plain(objects: dict[str, Any], item: Any, budget: _Budget) -> Any:
    """Returns a value of plain types, or `_NOT_PLAIN`."""
    budget.spend()
    if not isinstance(item, dict):
        return _plain_leaf(item)
    if item.get("type") == "leaf":
        return _plain_leaf(item["value"])
    if item.get("type") != "ref":
        return _NOT_PLAIN
    target = objects[item["key"]]
    kind = target["type"]
    if kind.get("module") != "builtins" or kind.get("name") not in _CONTAINERS:
        return _NOT_PLAIN
    values = [_plain(objects, element, budget) for _, element in target["items"]]
    if any(value is _NOT_PLAIN for value in values):
        return _NOT_PLAIN
    return _CONTAINERS[kind["name"]](values)


def _plain_leaf(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else _NOT_PLAIN


def _strange_names(content: Any) -> list[str]:
    """Returns the functions and classes in the file that can do more than hold a setting.

    They are never imported. A file with such a name was manipulated, so the user gets an error.
    Modules outside the standard library are accepted, because the settings of models name them.
    """
    if isinstance(content, list):
        return [name for part in content for name in _strange_names(part)]
    if not isinstance(content, dict):
        return []
    found = [name for part in content.values() for name in _strange_names(part)]
    module, name = content.get("module"), content.get("name")
    if content.get("type") == "pyref" and _is_strange(module, name):
        found.append(f"{module}.{name}")
    return found


def _is_strange(module: Any, name: Any) -> bool:
    top = str(module).partition(".")[0]
    known = name in _HARMLESS_BUILTINS if top == "builtins" else top in _HARMLESS
    return (top in sys.stdlib_module_names or top in ("posix", "nt")) and not known


def _refuse_strange_files(context: Path) -> None:
    """Searches the pickle and yaml files next to io.json for code that loading would run.

    Raises:
        UserError: A file names such code. The code was not run.
    """
    problems = []
    for path in sorted(path for path in context.rglob("*") if path.is_file()):
        with reading(path, _USE_ANOTHER):
            found = _names_in_file(path)
        problems += [f"{path}: not to be trusted: it names {name}." for name in sorted(set(found))]
    if problems:
        raise UserError(problems)


def _names_in_file(path: Path) -> list[str]:
    is_yaml, is_pickle = path.suffix in (".yaml", ".yml"), path.suffix in (".pkl", ".pickle")
    if not is_yaml and not is_pickle:
        with path.open("rb") as file:
            is_pickle = file.read(1) == b"\x80"
    if not is_yaml and not is_pickle:
        return []
    content = read_regular_file(path, _LOOKED_THROUGH_BYTES)
    return (
        _names_in_yaml(content.decode(errors="replace")) if is_yaml else _names_in_pickle(content)
    )


def _names_in_yaml(text: str) -> list[str]:
    tags = re.findall(r"!!python/[^\s\]},]+|tag:yaml.org,2002:python/[^\s>\]},]+", text)
    targets = re.findall(r"""_target_["']?\s*:\s*["']?([\w.]+)""", text)
    return tags + [name for name in targets if _is_strange(*name.rpartition(".")[::2])]


def _names_in_pickle(content: bytes) -> list[str]:
    """Returns the unsafe names in a pickle, without running the pickle.

    Pickles look up methods with `getattr`, so `getattr` is accepted.
    """
    found, texts = [], ["", ""]
    with contextlib.suppress(ValueError):  # no program can read the rest of such a file
        for operation, argument, _ in pickletools.genops(content):
            if isinstance(argument, str):
                texts = [texts[1], argument]
            if operation.name in ("GLOBAL", "INST"):
                found.append(tuple(str(argument).split(" ", 1)))
            elif operation.name == "STACK_GLOBAL":
                found.append((texts[0], texts[1]))
    return [
        f"{module}.{name}"
        for module, name in found
        if _is_strange(module, name) and (module, name) != ("builtins", "getattr")
    ]
