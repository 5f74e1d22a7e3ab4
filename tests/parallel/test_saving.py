"""Which rank reads which files of a checkpoint while the job saves it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints import verify
from tests.parallel import jobs


def files_read(folder: Path, world_size: int) -> list[str]:
    """Trains two steps, and saves; returns which files of the checkpoint this rank has read."""
    read = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[1] == "r" and "/.step=" in str(arguments[0]):
            read.append(Path(arguments[0]).name)

    sys.addaudithook(watch)  # for the rest of this rank's process
    jobs.pretrain(jobs.layout(world_size), folder, max_steps=2)
    return read


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_hashes_the_files_that_it_wrote(
    ranks: Any, tmp_path: Path, world_size: int
) -> None:
    """Rank 0 would need longer than a time-out for the bytes of a thousand ranks."""
    read = ranks.run(files_read, tmp_path, world_size, world_size=world_size)
    manifest = verify(tmp_path / "pretrain" / "checkpoints" / "step=000002")
    files = [Path(name).name for name in manifest.files]
    assert sorted(name for names in read for name in names) == sorted(files)  # once each
    for rank, names in enumerate(read):
        own = {name for name in names if name.endswith(".distcp")}
        assert own
        assert {name.split("_")[2] for name in own} == {str(rank)}
