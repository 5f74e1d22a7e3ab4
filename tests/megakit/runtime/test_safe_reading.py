"""Checkpoints of strangers: no code of a file runs; what Megatron and NeMo write comes back."""

import enum
import importlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megakit.errors import UserError
from tests.megakit.poison import (
    OTHER_PROGRAMS,
    OWNERS,
    Bomb,
    archive,
    load,
    metadata_of,
    refusal,
    running_programs,
    whole,
    write_metadata,
)

pytestmark = pytest.mark.usefixtures("megatron")

WEIGHT = "module.first.weight"


def put(checkpoint: Path, place: str, content: bytes) -> None:
    """Puts content in the place of a file, of a tensor's parts, or of the objects among them."""
    if not place.startswith("a"):
        (checkpoint / "weights" / place).write_bytes(content)
        return
    metadata = metadata_of(checkpoint)
    kinds = metadata.state_dict_metadata
    (checkpoint / "weights" / "__9_0.distcp").write_bytes(content)
    for key, stored in metadata.storage_data.items():
        is_object = type(kinds[key.fqn]).__name__ == "BytesStorageMetadata"
        if is_object if place == "an object" else key.fqn == WEIGHT:
            stored.relative_path, stored.offset, stored.length = "__9_0.distcp", 0, len(content)
    write_metadata(checkpoint, metadata)


@pytest.mark.parametrize("place", [".metadata", "common.pt", "a tensor", "an object"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_program_runs_or_changes_a_class(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    owners = [
        getattr(importlib.import_module(module), name)
        for module, _, name in (owner.rpartition(".") for owner in OWNERS)
    ]
    owners.append(owners[1](0))
    before = [dict(vars(owner)) for owner in owners]
    original = metadata_of(checkpoint)
    running = running_programs(tmp_path / "trace")
    for number, (name, program) in enumerate((running | OTHER_PROGRAMS).items()):
        write_metadata(checkpoint, original)
        # Early versions of torch wrote pickles without an archive, and `torch.load` reads them.
        is_pickle = place == ".metadata" or number % 4 == 3
        put(checkpoint, place, whole(program) if is_pickle else archive(whole(program)))
        if name in running and place == ".metadata":  # it runs where nothing guards
            value = pickle.loads(whole(program))
            if hasattr(value, "wait"):
                value.wait()
            assert (tmp_path / "trace").exists(), name
            (tmp_path / "trace").unlink()
        message = refusal(checkpoint, tmp_path / "trace")
        file = "" if place.startswith("a") else f"/{place}"
        assert message.startswith(f"{checkpoint}/weights{file}: cannot be read"), name
        assert [dict(vars(owner)) for owner in owners] == before, name


def place(**values: Any) -> Callable[[Any], None]:
    """Changes where the first part of a weight lies."""

    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
        vars(metadata.storage_data[index]).update(values)

    return change


OUTSIDE = "which is not a file in the same folder"
UNREADABLE = "cannot be read"
CHANGES: list[tuple[Callable[[Any], None], str]] = [
    *((place(relative_path=name), OUTSIDE) for name in ("../../secret", "/etc/passwd", b"x")),
    *((place(relative_path=name), UNREADABLE) for name in ("absent.distcp", "a\0b", "..")),
    *((place(offset=value), UNREADABLE) for value in (-1, 1.5, 10**30)),
    *((place(length=value), UNREADABLE) for value in (-1, 0, 10**30)),
    (place(transform_descriptors=("os.system",)), UNREADABLE),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_metadata_that_lead_astray(
    checkpoint: Path, change: Callable[[Any], None], told: str
) -> None:
    metadata = metadata_of(checkpoint)
    change(metadata)
    write_metadata(checkpoint, metadata)
    assert told in refusal(checkpoint)


@pytest.mark.parametrize("content", ["a list", "another shape"])
def test_another_thing_instead_of_a_tensor(checkpoint: Path, content: str) -> None:
    import torch

    file = io.BytesIO()
    torch.save([1] * 1000 if content == "a list" else torch.zeros(8, 6, 2), file)
    put(checkpoint, "a tensor", file.getvalue())
    assert f"{checkpoint}/weights: cannot be read" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("metadata.json", content) for content in (b"{}", b"[" * 100_000)),
        ("metadata.json", b'{"sharded_backend": "zarr"}'),
        ("metadata.json", b'{"sharded_backend": "torch_dist", "common_backend": "zarr"}'),
        *((name, content) for name in (".metadata", "common.pt") for content in (b"", b"no")),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_damaged_files_and_other_formats(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / "weights" / name).write_bytes(content)
    message = refusal(checkpoint)
    assert message.startswith(f"{checkpoint}/weights")
    assert "cannot be read" in message


def test_what_the_context_names_does_not_run(checkpoint: Path, tmp_path: Path) -> None:
    """Only io.json is read, as JSON; NeMo's reader would run each of these files."""
    trace = tmp_path / "trace"
    (checkpoint / "context" / "model.yaml").write_text(
        f"!!python/object/apply:os.system ['touch {trace}']\n"
    )
    (checkpoint / "context" / "8c1f2e").write_bytes(pickle.dumps(Bomb(trace)))
    (checkpoint / "weights" / "payload.pkl").write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)
    assert not trace.exists()


def test_common_state_is_a_dictionary(tmp_path: Path) -> None:
    """NeMo's `ModelCheckpoint` saves its folder as a path in each checkpoint of a run."""
    import torch

    from megakit.runtime.safe_reading import read_common

    path = tmp_path / "common.pt"
    common = {"step": 1, "dirpath": Path("/runs", "pretrain")}
    torch.save(common | {"rates": torch.ones(2)}, path)
    assert common.items() <= read_common(path).items()
    torch.save([("step", 1)], path)
    with pytest.raises(UserError, match=f"{path}: cannot be read .*a list"):
        read_common(path)


@pytest.mark.parametrize("version", ["3.11.2", "3.12", "3.13"])
def test_checkpoints_of_other_pythons(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """3.11.2 pickles an Enum's member as a call of `getattr`, 3.13 a path of another module."""
    import torch

    from megakit.runtime.safe_reading import read_common

    metadata = metadata_of(checkpoint)
    metadata.storage_meta.checkpoint_id = Path("/runs/pretrain")
    common = checkpoint / "weights" / "common.pt"
    if version == "3.11.2":
        reduce = lambda member, _: (getattr, (type(member), member.name))  # noqa: E731
        monkeypatch.setattr(enum.Enum, "__reduce_ex__", reduce)
    made = pickle.dumps(metadata, protocol=3)
    assert (b"getattr" in made) == (version == "3.11.2")
    common_pickle = pickle.dumps({"dirpath": Path("/runs")}, protocol=2)
    if version == "3.13":
        made, common_pickle = (
            one.replace(b"cpathlib\n", b"cpathlib._local\n") for one in (made, common_pickle)
        )
        assert b"_local" in made
    (checkpoint / "weights" / ".metadata").write_bytes(made)
    found = metadata_of(checkpoint)
    assert found == metadata
    assert found.state_dict_metadata[WEIGHT].properties.memory_format is torch.contiguous_format
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)
    common.write_bytes(archive(common_pickle))
    assert read_common(common) == {"dirpath": Path("/runs")}
