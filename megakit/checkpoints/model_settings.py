"""Reads the settings of a checkpoint's model: from the manifest, or from NeMo's context as JSON.

NeMo's own reader imports and calls what the file names, and loads the pickles beside it.
"""

import json
from pathlib import Path
from typing import Any

from megakit.checkpoints.manifest import CONTEXT, MANIFEST, read_manifest
from megakit.errors import USE_ANOTHER, reading

_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_NOT_PLAIN = object()


def read_model_settings(checkpoint: Path) -> dict[str, Any]:
    """Returns the settings of the model's config at the time of the save, by field name.

    Numbers, strings, booleans, None and containers of them are settings; the rest is skipped.

    Raises:
        UserError: The settings are missing or cannot be parsed.
    """
    if (checkpoint / MANIFEST).is_file() and (settings := read_manifest(checkpoint).settings):
        return settings
    with reading(checkpoint / CONTEXT / "io.json", USE_ANOTHER):
        objects, config = _read_config(checkpoint)
        values = {name: _plain(objects, item) for name, item in _items(objects, config).items()}
        return {name: value for name, value in values.items() if value is not _NOT_PLAIN}


def read_config_class(checkpoint: Path) -> tuple[str, str]:
    """Returns module and name of the class of a checkpoint's config, without importing it.

    Raises:
        UserError: The context is missing, cannot be parsed, or does not name the class.
    """
    with reading(checkpoint / CONTEXT / "io.json", USE_ANOTHER):
        objects, config = _read_config(checkpoint)
        cls = _items(objects, objects[config["key"]]["metadata"])["fn_or_cls"]
        return str(cls["module"]), str(cls["name"])


def _read_config(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the objects in io.json, and the reference to the config."""
    content = json.loads((checkpoint / CONTEXT / "io.json").read_bytes())
    objects = content["objects"]
    return objects, _items(objects, _items(objects, content["root"])["model"])["config"]


def _items(objects: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a referenced object; fiddle writes names as `Attr(name='...')`."""
    pairs = objects[reference["key"]]["items"]
    return {key.removeprefix("Attr(name='").removesuffix("')"): item for key, item in pairs}


def _plain(objects: dict[str, Any], item: Any) -> Any:
    """Returns a value of plain types, or `_NOT_PLAIN`."""
    if isinstance(item, dict) and item.get("type") == "ref":
        target = objects[item["key"]]
        if target["type"].get("module") != "builtins":
            return _NOT_PLAIN
        make = _CONTAINERS.get(target["type"]["name"])
        values = [_plain(objects, element) for _, element in target["items"]]
        return _NOT_PLAIN if make is None or _NOT_PLAIN in values else make(values)
    if isinstance(item, dict) and item.get("type") == "leaf":
        item = item["value"]
    return item if item is None or isinstance(item, bool | int | float | str) else _NOT_PLAIN
