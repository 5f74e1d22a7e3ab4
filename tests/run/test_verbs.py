"""The verbs of `run`: what each calls, and what is refused."""

import os
import re
import shutil
import subprocess
import time

import pytest

from tests.run.harness import BASE_PYTHON, as_if_set_up, bare_environment, start, write_program


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_the_verbs_and_sets_up_nothing(project, arguments):
    done = start(project, *arguments, python=None)
    assert done.returncode == 0
    assert done.stderr == ""
    listed = re.findall(r"^  (\w+) ", done.stdout, flags=re.MULTILINE)
    verbs = (
        "tutorial tests pretrain finetune predict layout tensorboard notebook benchmarks new setup"
    )
    assert " ".join(listed) == verbs
    assert not (project / ".venv").exists()


def test_scripts_are_verbs_in_the_order_of_their_stages(project):
    """A script without a stage's number is listed last; what is no script is no verb."""
    (project / "mnist/tutorial.py").unlink()
    (project / "model_finetune.py").unlink()
    (project / "model_sample.py").write_text('"""Stage 2: write a text: with a model."""\n')
    (project / "model_a_plot.py").write_text('"""Draws curves."""\n')
    (project / "model_components.py").write_text('"""Stage 0: parts."""\n')
    done = start(project, python=None)
    verbs = "tests pretrain sample predict a_plot layout"
    assert re.findall(r"^  (\w+) ", done.stdout, flags=re.MULTILINE)[:6] == verbs.split()
    for line in ("pretrain     pretrain a model", "sample       write a text", "Draws curves"):
        assert re.search(rf" {line}$", done.stdout, flags=re.MULTILINE)
    as_if_set_up(project, 'echo "${1##*/}"')
    assert start(project, "sample", python=None).stdout == "model_sample.py\n"
    for verb in ("components", "finetune", "tutorial", "../run", "-x", "a plot"):
        refused = start(project, verb, python=None)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"run: no verb '{verb}' in this project")


def test_the_layout_of_the_first_script_by_default(project):
    (project / "model_pretrain.py").rename(project / "model_train.py")
    (project / "model_a_plot.py").write_text('"""Draws curves."""\n')
    as_if_set_up(project, 'echo "${4##*/}"')
    assert start(project, "layout", "--seed", "1", python=None).stdout == "model_train.py\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tutoral"], "no verb 'tutoral'"),
        (["setup", "--wheel", "x"], "--download DIR, --wheels DIR or --venv DIR, not --wheel"),
        (["setup", "dev", "docs"], "no group 'docs' in locks/: build dev uv"),
        (["setup", "--wheels"], "--wheels takes one folder"),
        (["setup", "--wheels", "nowhere"], "no wheels in nowhere"),
        (["setup", "--venv"], "--venv takes one folder"),
        (["setup", "--venv", ".venv"], "--venv .venv: is the one to set up"),
    ],
)
def test_bad_arguments_are_refused_in_one_message(project, arguments, message):
    done = start(project, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        (["tutorial", "--seed", "1"], "<root>/mnist/tutorial.py|--seed|1"),
        (["pretrain"], "<root>/model_pretrain.py"),
        (["finetune", "--lr", "1e-3"], "<root>/model_finetune.py|--lr|1e-3"),
        (["predict", "--help"], "<root>/model_predict.py|--help"),
        (
            ["layout", "--devices", "8"],
            "-P|-m|megakit.testing.layout|<root>/model_pretrain.py|--devices|8",
        ),
        (["layout", "finetune"], "-P|-m|megakit.testing.layout|<root>/model_finetune.py"),
        (["layout", "my.py", "-h"], "-P|-m|megakit.testing.layout|my.py|-h"),
        (["tensorboard", "--port", "1"], "-W|ignore|-P|-m|tensorboard.main|--logdir|runs|--port|1"),
        (
            ["notebook", "--no-browser"],
            "-P|-m|notebook|--ServerApp.root_dir=<root>"
            "|--JupyterNotebookApp.default_url=/notebooks/notebooks/mnist_megatron.ipynb"
            "|--no-browser",
        ),
        (["notebook", "--renew"], "<root>/notebooks/renew.py"),
        (["benchmarks", "data"], "<root>/benchmarks/run_all.py|data"),
        (["new", "../mine"], "<root>/template/new.py|../mine"),
        (
            ["tests", "-k", "a b"],
            "-m|pytest|-n|auto|--dist|loadfile|--no-loadscope-reorder|-k|a b",
        ),
    ],
)
def test_verbs_call_what_they_stand_for_at_once(project, arguments, called):
    as_if_set_up(project, "IFS='|'; echo \"$*\"")
    began = time.perf_counter()
    done = start(project, *arguments, python=None)
    assert time.perf_counter() - began < 5
    assert done.stdout.replace(str(project), "<root>") == called + "\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_renewed_notebook_takes_no_options(project):
    as_if_set_up(project, "echo ran")
    done = start(project, "notebook", "--renew", "--no-browser", python=None)
    assert (done.returncode, done.stdout) == (2, "")
    assert "MNIST_DATA_DIR says where MNIST is" in done.stderr


@pytest.mark.parametrize(
    ("answer", "is_as_asked"), [("echo 3.12", 1), ("echo 3.11", 0), ("exit 1", 0)]
)
def test_what_is_set_up_serves_only_the_python_that_is_asked_for(project, answer, is_as_asked):
    as_if_set_up(project, "echo ran")
    python = write_program(project.parent / "python", answer)
    done = start(project, "predict", python=python)
    assert done.stdout == "ran\n" * is_as_asked
    assert (done.returncode == 0) == is_as_asked


# Writes which file each standard stream is, without another file in place of standard output.
STREAMS = """
for number in 0 1 2; do files+=$(readlink /proc/$$/fd/$number)'|'; done
echo "$files" >"$0.streams"
"""


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 1, 2)])
def test_closed_streams_are_no_failure(project, closed):
    """A file that is opened next would else take the place of a stream."""
    as_if_set_up(project, STREAMS)

    def close():
        for descriptor in closed:
            os.close(descriptor)

    for verb in ("setup", "predict"):
        done = subprocess.run(
            [project / "run", verb],
            env=bare_environment(project, python=None),
            preexec_fn=close,
            timeout=60,
        )
        assert done.returncode == 0
    files = (project / ".venv/bin/python.streams").read_text().split("|")
    assert {files[descriptor] for descriptor in closed} == {"/dev/null"}


def test_no_verb_imports_from_the_current_folder(project, tmp_path):
    """Whoever stands in a folder of downloads runs nothing of it."""
    venv, honest = project / ".venv", "import json, torch\nprint('honest')\n"
    as_if_set_up(project, "echo replaced by a real one")
    shutil.rmtree(venv / "lib")
    (venv / "bin/python").unlink()
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "torch.py").touch()
    scripts = ["mnist/tutorial.py", "notebooks/renew.py", "benchmarks/run_all.py"]
    scripts += [f"model_{stage}.py" for stage in ("pretrain", "finetune", "predict")]
    modules = ["tensorboard/main.py", "notebook/__main__.py", "pytest/__main__.py"]
    modules += ["megakit/testing/layout.py"]
    for file in (*(project / name for name in scripts), *(packages / name for name in modules)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(honest)

    downloads = tmp_path / "downloads"
    downloads.mkdir()
    hostile = "tensorboard notebook pytest pip torch json sitecustomize megakit"
    for name in hostile.split():
        (downloads / f"{name}.py").write_text("open('mark', 'w').close()\nprint('hostile')\n")
    verbs = ["tutorial", "tests", "pretrain", "finetune", "predict", "tensorboard", "benchmarks"]
    for verb in (*verbs, "layout", "notebook", "notebook --renew"):
        done = start(project, *verb.split(), cwd=downloads, python=None)
        assert (done.stdout, done.stderr) == ("honest\n", ""), verb
    assert not (downloads / "mark").exists()
