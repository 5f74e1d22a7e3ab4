"""What a `.metadata` may say: no place outside its folder, and no size beyond what is stored."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megakit.poison import metadata_of, refusal, write_metadata

pytestmark = pytest.mark.usefixtures("megatron")

NO_FILE = "which is not a file in the same folder"
NAMES = ("../../secret", "/etc/passwd", "folder/file", b"__0_0.distcp", "..")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        *(("relative_path", value, f"names {str(value)[:200]}, {NO_FILE}") for value in NAMES),
        ("relative_path", "absent.distcp", "No such file"),
        *(("offset", value, "is not a number of bytes") for value in (-1, 1.5)),
        *((name, 10**15, "beyond the end") for name in ("offset", "length")),
        ("transform_descriptors", ("zstd",), "a transformation of"),
    ],
)
def test_a_place_that_leads_astray(checkpoint: Path, name: str, value: Any, told: str) -> None:
    metadata = metadata_of(checkpoint)
    setattr(next(iter(metadata.storage_data.values())), name, value)
    write_metadata(checkpoint, metadata)
    assert told in refusal(checkpoint)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("size", (10**6, 10**6), "weights do not fit"),
        ("size", (1, 1), "a part outside of the tensor"),
        ("chunks", [], "module.first.weight has 0 of 48 numbers"),
        ("chunks", "twice", "parts that overlap"),
    ],
)
def test_sizes_are_compared_with_what_is_stored(
    checkpoint: Path, name: str, value: Any, told: str
) -> None:
    metadata = metadata_of(checkpoint)
    entry = metadata.state_dict_metadata["module.first.weight"]
    if value == "twice":
        value = entry.chunks * 2
    setattr(entry, name, torch.Size(value) if name == "size" else value)
    write_metadata(checkpoint, metadata)
    assert told in refusal(checkpoint)
