"""What a power failure would leave: which files are on the disk at the moment of a rename."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Records the flushes and renames of this process.

    Args:
        monkeypatch: Undoes the recording.
        on_rename: Called with the source and the target before each rename.

    Attributes:
        events: In order, `flush NAME` and `rename NAME to NAME`. If a file or folder below the
            source was written after its last flush, `, not flushed: PATHS` follows.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        on_rename: Callable[[Path, Path], None] = lambda source, target: None,
    ) -> None:
        self.events: list[str] = []
        self._flushed: dict[int, Any] = {}
        fsync = os.fsync

        def record_flush(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            self._flushed[path.stat().st_ino] = _content(path)
            self.events.append(f"flush {path.name}")

        def recorded(rename: Callable[..., None]) -> Callable[..., None]:
            def record_rename(source: str, target: str) -> None:
                on_rename(Path(source), Path(target))
                lost = ", ".join(self._not_flushed(Path(source)))
                self.events.append(
                    f"rename {Path(source).name} to {Path(target).name}"
                    + (f", not flushed: {lost}" if lost else "")
                )
                rename(source, target)

            return record_rename

        monkeypatch.setattr(os, "fsync", record_flush)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, recorded(getattr(os, name)))

    def _not_flushed(self, source: Path) -> list[str]:
        return [
            str(path.relative_to(source.parent))
            for path in (source, *sorted(source.rglob("*")))
            if self._flushed.get(path.stat().st_ino) != _content(path)
        ]


def _content(path: Path) -> Any:
    return {entry.name for entry in path.iterdir()} if path.is_dir() else path.read_bytes()
