"""Writes a checkpoint's context, the settings of its model in NeMo's format; reads it safely."""

import contextlib
import itertools
import json
import pickletools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megakit.checkpoints.manifest import CONTEXT, refuse_links
from megakit.errors import USE_ANOTHER, UserError, reading
from megakit.runtime.foreign_files import JSON_BYTES, read_regular_file

#: The largest accepted number of values in settings. A shared value counts once per use: in a small
#: file, 60 nested `[x, x]` mean 2**60 values.
_MAX_VALUES = 100_000
#: Size limit of pickle and yaml files next to io.json; larger files are refused.
_SEARCHED_BYTES = 4 << 20
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
_NOT_PLAIN = object()


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
    with reading(checkpoint / CONTEXT / "io.json", USE_ANOTHER):
        objects, config = _read_config(checkpoint)
        count = itertools.count(1)
        values = {n: _plain(objects, item, count) for n, item in _items(objects, config).items()}
        return {name: value for name, value in values.items() if value is not _NOT_PLAIN}


def read_config_class(checkpoint: Path) -> tuple[str, str]:
    """Returns module and name of the class of a checkpoint's config, without importing it.

    Raises:
        UserError: `read_model_settings` raises it, or the context does not name the class.
    """
    with reading(checkpoint / CONTEXT / "io.json", USE_ANOTHER):
        objects, config = _read_config(checkpoint)
        cls = _items(objects, objects[config["key"]]["metadata"])["fn_or_cls"]
        return str(cls["module"]), str(cls["name"])


def _read_config(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the objects in io.json, and the reference to the config; refuses unsafe files."""
    path = checkpoint / CONTEXT / "io.json"
    refuse_links(checkpoint)
    if not path.is_file():
        raise UserError(
            f"{checkpoint}: the settings of its model ({CONTEXT}/io.json) are missing. "
            "Use another checkpoint."
        )
    content = json.loads(read_regular_file(path, JSON_BYTES))
    if type(content) is not dict:
        raise ValueError(f"it is a {type(content).__name__} instead of an object")
    if unsafe := sorted(set(_unsafe_names_in_json(content))):
        raise ValueError(f"it names {', '.join(unsafe)}, which settings do not need")
    _refuse_unsafe_files(path.parent)
    objects = content["objects"]
    return objects, _items(objects, _items(objects, content["root"])["model"])["config"]


def _items(objects: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a referenced object; fiddle writes names as `Attr(name='...')`."""
    pairs = objects[reference["key"]]["items"]
    return {key.removeprefix("Attr(name='").removesuffix("')"): item for key, item in pairs}


def _plain(objects: dict[str, Any], item: Any, count: Iterator[int]) -> Any:
    """Returns a value of plain types, or `_NOT_PLAIN`; `count` counts all values."""
    if next(count) > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES:,} values")
    if isinstance(item, dict) and item.get("type") == "ref":
        target = objects[item["key"]]
        kind = target["type"]
        if kind.get("module") != "builtins" or kind.get("name") not in _CONTAINERS:
            return _NOT_PLAIN
        values = [_plain(objects, element, count) for _, element in target["items"]]
        is_plain = all(value is not _NOT_PLAIN for value in values)
        return _CONTAINERS[kind["name"]](values) if is_plain else _NOT_PLAIN
    if isinstance(item, dict) and item.get("type") == "leaf":
        item = item["value"]
    return item if item is None or isinstance(item, bool | int | float | str) else _NOT_PLAIN


def _unsafe_names_in_json(content: Any) -> Iterator[str]:
    """Yields the functions and classes in the file that can do more than hold a setting.

    Modules outside the standard library are accepted, because the settings of models name them.
    """
    if isinstance(content, list | dict):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _unsafe_names_in_json(part)
    if isinstance(content, dict) and content.get("type") == "pyref":
        module, name = content.get("module"), content.get("name")
        if _is_unsafe(module, name):
            yield f"{module}.{name}"


def _is_unsafe(module: Any, name: Any) -> bool:
    top = str(module).partition(".")[0]
    known = name in _HARMLESS_BUILTINS if top == "builtins" else top in _HARMLESS
    return (top in sys.stdlib_module_names or top in ("posix", "nt")) and not known


def _refuse_unsafe_files(context: Path) -> None:
    """Searches the pickle and yaml files next to io.json for code that loading would run.

    Raises:
        UserError: A file names such code. The code was not run.
    """
    problems = []
    for path in sorted(path for path in context.rglob("*") if path.is_file()):
        with reading(path, USE_ANOTHER):
            names = sorted(set(_unsafe_names_in_file(path)))
        problems += [
            f"{path}: the file is unsafe: it names {name}. Use another checkpoint."
            for name in names
        ]
    if problems:
        raise UserError(problems)


def _unsafe_names_in_file(path: Path) -> list[str]:
    if path.suffix in (".yaml", ".yml"):
        text = read_regular_file(path, _SEARCHED_BYTES).decode(errors="replace")
        tags = re.findall(r"!!python/[^\s\]},]+|tag:yaml.org,2002:python/[^\s>\]},]+", text)
        targets = re.findall(r"""_target_["']?\s*:\s*["']?([\w.]+)""", text)
        return tags + [name for name in targets if _is_unsafe(*name.rpartition(".")[::2])]
    with path.open("rb") as file:
        is_pickle = path.suffix in (".pkl", ".pickle") or file.read(1) == b"\x80"
    return _unsafe_names_in_pickle(read_regular_file(path, _SEARCHED_BYTES)) if is_pickle else []


def _unsafe_names_in_pickle(content: bytes) -> list[str]:
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
        if _is_unsafe(module, name) and (module, name) != ("builtins", "getattr")
    ]
