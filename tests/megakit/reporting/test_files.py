"""Files that are there whole or not at all."""

import textwrap

from megakit.reporting.files import write_atomically
from tests.disk import Disk
from tests.scripts import run_python


def test_a_new_file_replaces_the_old_one_in_one_step(tmp_path):
    """Who reads the old file goes on reading all of it."""
    path = tmp_path / "file.csv"
    write_atomically(path, "old " * 1000)
    with path.open() as reader:
        assert reader.read(4) == "old "
        write_atomically(path, "new")
        assert reader.read() == "old " * 999
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_file_appears_when_it_is_on_the_disk(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    write_atomically(tmp_path / "file.csv", "new")
    assert disk.events == ["flush .file.csv.partial", "rename .file.csv.partial to file.csv"]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A limit on the size of files fails in the middle of writing, as a full disk does."""
    path = tmp_path / "file.csv"
    write_atomically(path, "old")
    code = """
        import resource, signal, sys
        from pathlib import Path
        from megakit.reporting.files import write_atomically
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        write_atomically(Path(sys.argv[1]), "new" * 10_000)
    """
    done = run_python("-c", textwrap.dedent(code), path)
    assert done.status == 1
    assert "OSError" in done.err
    assert path.read_text() == "old"
