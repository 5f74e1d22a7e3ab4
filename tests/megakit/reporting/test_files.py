"""Files that are there whole or not at all."""

import json
import signal
import subprocess
import sys
import textwrap

import pytest

from megakit.reporting.files import write_atomically, write_json
from tests.disk import Disk
from tests.scripts import REPOSITORY, run_python


def test_the_text_as_it_is(tmp_path):
    path = tmp_path / "file.csv"
    text = "a,ü,━\nb\r\nc"
    write_atomically(path, text)
    assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]


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


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.csv"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half \ud800")
    assert path.read_text() == "old"


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


def test_what_a_kill_left_is_written_over(tmp_path):
    path = tmp_path / "file.csv"
    (tmp_path / ".file.csv.partial").write_text("much longer than the new text")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_killed_while_writing_again_and_again(tmp_path):
    """There is the old file or the new one, and never a part."""
    path = tmp_path / "file.csv"
    texts = [letter * 200_000 for letter in "ab"]
    write_atomically(path, texts[0])
    code = """
        import itertools, sys
        from pathlib import Path
        from megakit.reporting.files import write_atomically
        for letter in itertools.cycle("ab"):
            write_atomically(Path(sys.argv[1]), letter * 200_000)
            print(flush=True)
    """
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), path],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        for _ in range(3):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert path.read_text() in texts


def test_json(tmp_path):
    content = {"b": [1, 0.1, None], "a": {"ü": "━"}}
    write_json(tmp_path / "summary.json", content)
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text) == content
    assert text.endswith("}\n")
    assert text.index('"b"') < text.index('"a"')


def test_content_that_is_no_json_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "summary.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "summary.json", {"a": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
