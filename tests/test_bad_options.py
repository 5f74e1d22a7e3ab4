"""Options that the three scripts refuse: real processes that end with status 2.

None of them may load torch or NeMo, whose place folders of the same names take that leave a mark.
"""

import re
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from model_finetune import FINETUNE
from model_pretrain import PRETRAIN
from tests.fabricate import LAST, make_run
from tests.refusals import FINETUNE_PY, OPTIONS, PREDICT_PY, PRETRAIN_PY, SCRIPTS, spoil
from tests.scripts import run_script

HAS_GPU_DRIVER = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def is_quick(run):
    """Whether a process takes less than half a second of the processor.

    A busy or slow machine stretches that time too: there, five times what Python and the parser
    of options take beside it. One quick run of three shows it.
    """
    parser = [sys.executable, "-P", "-c", "import tyro"]
    for _ in range(3):
        needed = processor_time(run)
        if needed < 0.5 or needed < 5 * processor_time(lambda: subprocess.run(parser, check=True)):
            return True
    return False


def processor_time(run):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_traps_work(traps, tmp_path):
    """A process that is not refused goes on to its work, loads a framework, and is caught."""
    given = ("--output-dir", tmp_path, "--dataset", "digits", "--accelerator", "cpu")
    assert run_script(PRETRAIN_PY, *given, PYTHONPATH=str(traps)).status == 1
    assert list(traps.glob("*.loaded"))


class TestHelp:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_quick_and_complete(self, script, traps):
        given: Any = {"PYTHONPATH": str(traps), "COLUMNS": "80"}
        result = run_script(script, "--help", **given)
        assert (result.status, result.err) == (0, "")
        named = re.findall(r"^\W*(?:-h, )?(--[\w-]+)", result.out, re.MULTILINE)
        assert len(named) == len(set(named))
        assert set(named) == OPTIONS[script]
        assert list(traps.glob("*.loaded")) == []
        assert is_quick(lambda: run_script(script, "--help", **given))


class TestOptions:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_unknown(self, refused, script):
        message = refused(script, "--warp", "9")
        assert "--warp" in message
        assert "--help" in message
        assert "Is it" not in message

    def test_all_values_of_the_wrong_kind_together(self, refused):
        message = refused(PRETRAIN_PY, "--precision", "16", "--dataset", "cifar", "--warp", "9")
        for part in ("16", "cifar", "--warp"):
            assert part in message

    @pytest.mark.parametrize("script", SCRIPTS)
    def test_numbers_out_of_range_all_together(self, refused, script):
        wrong = {
            **dict.fromkeys(("--devices", "--num-nodes", "--tensor-parallel"), "0"),
            **dict.fromkeys(("--pipeline-parallel", "--micro-batch-size", "--timeout"), "0"),
            "--num-workers": "-1",
        }
        if script != PREDICT_PY:
            wrong |= dict.fromkeys(("--max-steps", "--global-batch-size", "--val-interval"), "0")
            wrong |= dict.fromkeys(("--save-interval", "--limit-val-batches"), "0")
            wrong |= {"--seed": "-1", "--lr": "-0.5"}
        if script == PRETRAIN_PY:
            wrong |= {"--corruption": "1.0"}
        if script == FINETUNE_PY:
            wrong |= {"--num-labels": "9", "--checkpoint": "none"}
        problems = refused.problems(script, *(part for pair in wrong.items() for part in pair))
        wrong.pop("--checkpoint", None)
        for option, value in wrong.items():
            (problem,) = (text for text in problems if text.startswith(f"{option} "))
            assert problem.startswith(f"{option} {value}: has to be ")
        others = [text for text in problems if text.split()[0] not in wrong]
        # prediction has nothing to start from either, and says so
        assert len(others) == (script == PREDICT_PY)

    def test_nothing_is_downloaded_for_a_command_that_is_refused_anyway(self, refused):
        """11 MB in the data folder are something written, too."""
        asked = []
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer():
                while True:
                    try:
                        connection, _ = server.accept()
                    except OSError:
                        return
                    with connection:
                        asked.append(connection.recv(1000))

            threading.Thread(target=answer, daemon=True).start()
            proxy = f"http://127.0.0.1:{server.getsockname()[1]}"
            refused(
                *(PRETRAIN_PY, "--lr", "-1", "--dataset", "auto"),
                **{"https_proxy": proxy, "HTTPS_PROXY": proxy},
            )
            server.shutdown(socket.SHUT_RDWR)
        assert asked == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_layouts_that_do_not_fit_the_model(refused, pretrain_options, finetune_options, script):
    make_run(PRETRAIN, pretrain_options, (10,))
    make_run(FINETUNE, finetune_options, (5,))
    layout = ("--devices", 9, "--tensor-parallel", 3, "--pipeline-parallel", 3)
    problems = "\n".join(refused.problems(script, *layout))
    assert re.search(r"--pipeline-parallel 3: .* 2 stages", problems)
    # A made-up checkpoint, from which prediction reads the width, has none.
    assert re.search(r"--tensor-parallel 3: .*width.*64", problems) or script == PREDICT_PY


class TestAccelerator:
    @pytest.mark.skipif(HAS_GPU_DRIVER, reason="this machine has a GPU, or its driver at least")
    def test_no_gpu(self, refused):
        problem = refused.problem(PRETRAIN_PY, "--accelerator", "gpu")
        for part in ("--accelerator gpu", "no NVIDIA GPU", "--accelerator cpu"):
            assert part in problem


def test_problems_of_every_kind_are_told_together(refused, pretrain_options):
    folder = make_run(PRETRAIN, pretrain_options, (10,)).checkpoints
    spoil(folder / LAST)
    problems = refused.problems(
        *(FINETUNE_PY, "--num-labels", 3, "--lr", 0, "--devices", 4, "--pipeline-parallel", 4),
        *("--dataset", "mnist"),
    )
    text = "\n".join(problems)
    for part in ("--num-labels 3", "--lr 0.0", "--pipeline-parallel 4", "__0_0.distcp"):
        assert text.count(part) == 1, part


def test_a_refusal_takes_less_than_half_a_second(refused):
    assert is_quick(lambda: refused(FINETUNE_PY))
