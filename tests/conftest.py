"""What all tests share: the marked ones that need time or a GPU, and where MNIST is."""

import faulthandler
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mnist.files import MNIST_SHA256
from tests.once import Chain, once, trained_chain
from tests.scripts import run

REPOSITORY = Path(__file__).resolve().parents[1]
BEGAN = time.monotonic()
#: Time limit of a test in seconds, by its mark, at least twice what the slowest such test takes.
LIMITS = {"long": 1200, "gpu": 600}
LIMIT = 200  # without a mark; the first tests also wait for the chain or the pool of ranks
#: What takes minutes of `--all`, the longest first: else a worker begins it when the others end.
SLOW = (
    *("docs/test_commands", "exercises/", "docs/test_adapting", "docs/test_course", "test_new"),
    *("ladder/", "parallel/test_gpu_rehearsed", "test_compare", "notebooks/"),
)
terminal = 2  # standard error's descriptor while pytest captures it: see `pytest_configure`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked long, too")
    parser.addoption("--minutes", type=float, help="start no test marked long after so many")
    where = "folder with MNIST/raw; by default MNIST_DATA_DIR, data or ../shared/data"
    default = os.environ.get("MNIST_DATA_DIR")
    parser.addoption("--data-dir", type=Path, default=default, help=where)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--data-dir")
    if given is not None and not has_mnist(given):
        raise pytest.UsageError(f"--data-dir {given}: MNIST/raw and its four files are not in it.")
    global terminal
    terminal = os.dup(2)  # while a test runs, pytest has another file in its place
    if config.pluginmanager.hasplugin("hypothesispytest"):  # tests/gpu needs pytest alone
        from hypothesis import settings

        settings.register_profile("without a deadline", deadline=None)  # busy machines pause
        settings.load_profile("without a deadline")
    # Tests signal processes that they start; these inherit what a shell's `&` or `nohup` ignores.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_report_header() -> str:
    return "the whole short suite takes about 4 minutes on 2 cores"


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps a file's tests in one worker, and so those of the report, which share a costly fixture.

    With `--dist worksteal`, xdist distributes single tests: those marked gpu share nothing.
    """
    if config.getoption("dist") == "worksteal":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "report" if file.startswith("tests/mnist/report/") else file

    return Sharing(config, log)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, because many tests wait, and not too many for the memory."""
    return min(len(os.sched_getaffinity(0)) + 1, 6)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many tests did not run, and why."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} did not run: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a test that hangs; the next test then runs."""
    marks = {mark.name for mark in item.iter_markers()}
    limit = max((LIMITS[name] for name in marks & LIMITS.keys()), default=LIMIT)

    def fail(*_: object) -> None:
        pytest.fail(f"{item.nodeid} takes longer than {limit} s")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(limit)
    # C++ code that never returns to Python hears no signal: the process ends, and says where.
    faulthandler.dump_traceback_later(limit + 60, exit=True, file=terminal)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    os.environ.pop("MNIST_DATA_DIR", None)  # it would name a folder for every command
    if config.getoption("--all"):
        items.sort(key=place_of)
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(reason="long: takes minutes, give --all"))


def place_of(item: pytest.Item) -> int:
    """Where a test's file comes in `SLOW`, or after it."""
    name = item.nodeid.removeprefix("tests/")
    return next((n for n, begin in enumerate(SLOW) if name.startswith(begin)), len(SLOW))


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    is_late = minutes is not None and time.monotonic() - BEGAN > 60 * minutes
    if is_late and item.get_closest_marker("long"):
        pytest.skip(f"long: no time is left of --minutes {minutes:g}")
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(f"gpu: {reason}")


@cache
def why_no_gpu() -> str | None:
    """Asked in another process: a GPU that this one has opened stays open."""
    drivers = ("REHEARSE_GPUS" in os.environ, *map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))
    if not any(drivers):
        return "no driver of an NVIDIA GPU is loaded"
    code = "import torch; torch.zeros(1, device='cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().rpartition("\n")[2]
    return f"CUDA does not work here ({last})" if done.returncode else None


@pytest.fixture(scope="session")
def mnist_dir(pytestconfig: pytest.Config) -> Path:
    """A root with the real MNIST files, to be read only."""
    named = pytestconfig.getoption("--data-dir")
    default = (REPOSITORY / "data", REPOSITORY.parent / "shared" / "data")
    places = [named.resolve()] if named else default
    for root in places:
        if has_mnist(root):
            return root
    pytest.skip(f"no MNIST in {' or '.join(map(str, places))}")


def has_mnist(root: Path) -> bool:
    return all((root / "MNIST" / "raw" / name).is_file() for name in MNIST_SHA256)


@pytest.fixture(scope="session")
def newest_venv() -> Path:
    """An environment with the locks of template/megatron: a later Megatron-Core, and no NeMo."""
    venv = REPOSITORY / "build/venv-newest"
    if not venv.is_dir() and shutil.disk_usage(REPOSITORY).free < 15e9:
        pytest.skip("less than 15 GB of disk space: the environment takes 5.4, and uv's cache too")
    try:
        done = run(REPOSITORY / "ladder/newest.sh", "--setup", timeout=1000, VENV=sys.prefix)
    except subprocess.TimeoutExpired:
        pytest.skip("in 17 minutes, the packages of template/megatron were not downloaded")
    if done.status and "error sending request" in done.err:  # uv's words
        pytest.skip("no network: the packages of template/megatron cannot be downloaded")
    done.output()
    return venv


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """Megatron set up on a CPU; until this has run, tests must not import NeMo or Megatron."""
    from megakit.testing import distributed_model_parallel_state

    with distributed_model_parallel_state(accelerator="cpu"):
        yield


@pytest.fixture(scope="session")
def components(megatron: None) -> ModuleType:
    """`model_components`, which can be imported once an accelerator was chosen."""
    import model_components

    return model_components


@pytest.fixture(scope="session")
def made_up_root(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A root with files in MNIST's format and sizes, and their sha256 by name."""
    from tests.mnist.made_up import content_of

    root = tmp_path_factory.mktemp("made_up")
    (root / "MNIST" / "raw").mkdir(parents=True)
    digests = {}
    for name in MNIST_SHA256:
        content = content_of(name)
        (root / "MNIST" / "raw" / name).write_bytes(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    return root, digests


@pytest.fixture
def made_up_mnist(
    made_up_root: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A root with made-up files, to be read only; this process takes them for MNIST's."""
    root, digests = made_up_root
    for name, digest in digests.items():
        monkeypatch.setitem(MNIST_SHA256, name, digest)
    return root


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The tutorial at its defaults on the bundled digits, once for all tests; to be read only."""
    return trained_chain(tmp_path_factory)


@pytest.fixture(scope="session", params=["nemo", pytest.param("megatron", marks=pytest.mark.long)])
def script(request: pytest.FixtureRequest) -> str:
    """The script that pretrains, of each chain."""
    from tests.faults import harness

    return {"nemo": harness.NEMO, "megatron": harness.MEGATRON}[request.param]


@pytest.fixture(scope="session")
def never_stopped(tmp_path_factory: pytest.TempPathFactory, script: str) -> dict[str, Any]:
    """What a pretraining of 40 steps leaves behind to which nothing happened."""
    from tests.faults.harness import Training

    def make(folder: Path) -> None:
        start = Training(folder, script).start()
        assert start.status == 0, start.err

    name = f"never-stopped-{Path(script).parent.name}"
    return Training(once(tmp_path_factory, name, make), script).result()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """The pool of rank processes: it imports the frameworks once."""
    from megakit.testing import Ranks

    with Ranks(8, timeout=LIMIT - 20) as pool:
        yield pool
