"""`./run layout`: the table of a script's job, and what is refused."""

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakit.testing.layout import _listed, in_bytes
from tests.scripts import REPOSITORY, run

DIGITS = ("--dataset", "digits")
SIZES = ("--tensor-parallel", 4, "--pipeline-parallel", 2)


def layout(script, *options):
    return run(
        *(sys.executable, "-P", "-m", "megakit.testing.layout", script, *options),
        PYTHONPATH=str(REPOSITORY),
    )


def rows(out):
    """The table's cells, without its heading."""
    lines = out.split("\n\n")[1].splitlines()
    return [re.split(" {2,}", line) for line in lines[1:]]


def test_a_cluster_of_1024_ranks(tmp_path):
    cluster = (*SIZES, "--devices", 8, "--num-nodes", 128, "--global-batch-size", 512)
    done = layout(
        *(REPOSITORY / "model_pretrain.py", *DIGITS, *cluster, "--micro-batch-size", 2),
        *("--output-dir", tmp_path / "runs"),
    )
    assert done.output().startswith(
        "PretrainModel, 1024 processes: tensor 4 x pipeline 2 x data 128; precision bf16-mixed. "
        "Each rank computes 2 micro batches of 2 samples in a step.\n"
    )
    encoder, decoder = 16 * 784 + 16 + 3 * 16 + 3, 16 * 3 + 16 + 784 * 16 + 784
    z, x_hat = 2 * (2 * 3 * 2), 2 * (2 * 784 * 2)  # micro batches, samples, values, bfloat16
    assert rows(done.out) == [
        [
            *(f"{512 * stage} to {512 * stage + 511}", "0 to 3", str(stage)),
            *(f"{number:,}", *(in_bytes(size * number) for size in (2, 4, 12))),
            *(in_bytes(tensor), in_bytes(z), in_bytes(4 * number)),
        ]
        for stage, (number, tensor) in enumerate([(encoder, z), (decoder, x_hat + z)])
    ]
    assert done.err == ""
    assert not (tmp_path / "runs").exists()
    assert done.seconds < 60  # 5 on a quiet machine


@pytest.mark.parametrize(
    ("script", "options", "parameters"),
    [
        ("model_finetune.py", ("--hidden-size", 128, "--tensor-parallel", 2), ["50,475"]),
        ("model_pretrain.py", ("--hidden-size", 65_536, "--precision", 32), ["103,285,523"]),
        ("examples/vit/model_finetune.py", ("--pipeline-parallel", 2), ["104,192", "100,746"]),
    ],
)
def test_other_models_and_sizes(script, options, parameters):
    done = layout(REPOSITORY / script, *DIGITS, "--devices", 2, *options)
    assert done.output()
    assert [row[3] for row in rows(done.out)] == parameters


@pytest.mark.long
def test_options_of_the_strategy():
    """Each is passed to `train_stage`; the language model has 8 blocks of 16 bytes in a step."""
    sizes = ("--block-size", 16, "--hidden-size", 32, "--num-layers", 2, "--num-attention-heads", 2)
    ranks = ("--tensor-parallel", 2, "--pipeline-parallel", 2, "--devices", 8, "--precision", 32)
    job = (*sizes, *ranks, "--global-batch-size", 8, "--text", REPOSITORY / "LICENSE")
    script = REPOSITORY / "examples/gpt/model_pretrain.py"
    plain = rows(layout(script, *job).output())
    divided = rows(layout(script, *job, "--sequence-parallel", "--distributed-optimizer").output())
    activations = 4 * 16 * 32 * 4  # of this rank's half of the samples, float32
    for before, after in zip(plain, divided, strict=True):
        number = int(before[3].replace(",", ""))
        assert before[3:6] == after[3:6]
        assert (before[6], after[6]) == (in_bytes(8 * number), in_bytes(4 * number))
        assert (before[8], after[8]) == (in_bytes(activations), in_bytes(activations // 2))


def test_all_problems_at_once():
    wrong = ("--tensor-parallel", 3, "--pipeline-parallel", 4, "--devices", 12, "--lr", 0)
    done = layout(REPOSITORY / "model_finetune.py", *DIGITS, *wrong, "--checkpoint", "x")
    assert (done.status, done.out) == (2, "")
    problems = done.err.splitlines()
    assert all(line.startswith("model_finetune.py: --") for line in problems)
    named = [re.split("[ :]+", line)[1] for line in problems]
    assert named == ["--lr", "--checkpoint", "--tensor-parallel", "--pipeline-parallel"]


NO_TRAINING = """
from megakit.job.script import run_script
from model_pretrain import PRETRAIN, PretrainOptions
run_script(PRETRAIN, PretrainOptions, lambda run: run.path)
"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such script. Name a training script."),
        ("", "does not call run_script. Name a training script."),
        (NO_TRAINING, "its work trains neither by train_stage nor by train of megakit.training."),
    ],
)
def test_what_is_no_training_script(tmp_path, content, message):
    script = tmp_path / "model_mine.py"
    if content is not None:
        script.write_text(content)
    done = layout(script, *DIGITS)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1


def test_a_script_may_import_from_the_module_itself(tmp_path):
    """It must not train."""
    code = (REPOSITORY / "model_pretrain.py").read_text()
    changed = code.replace(
        "from megakit.training import cosine_annealing, megatron_adam, train_stage",
        "from megakit.training import cosine_annealing, megatron_adam\n"
        "    from megakit.training.stages import train_stage",
    )
    assert changed != code
    (tmp_path / "model_mine.py").write_text(changed)
    done = layout(tmp_path / "model_mine.py", *DIGITS, "--output-dir", tmp_path / "runs")
    assert done.output().startswith("PretrainModel, 1 process")
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_reads_a_value(tmp_path):
    """The message names its line."""
    code = (REPOSITORY / "model_components.py").read_text()
    line = "        return self.report(nn.functional.mse_loss"
    changed = code.replace(line, f"        print(forward_out['z'].sum().item())\n{line}")
    assert changed != code
    (tmp_path / "model_components.py").write_text(changed)
    script = tmp_path / "model_pretrain.py"
    script.write_text((REPOSITORY / "model_pretrain.py").read_text())
    done = layout(script, *DIGITS)
    assert (done.status, done.out) == (2, "")
    number = changed[: changed.index("print(forward_out")].count("\n") + 1
    assert "reads the values of a tensor" in done.err
    assert f"{tmp_path}/model_components.py:{number}." in done.err
    assert "Traceback" not in done.err


def test_a_prediction_is_refused():
    done = layout(REPOSITORY / "model_predict.py", "--devices", 2)
    assert (done.status, done.out) == (2, "")
    assert done.err == ("model_predict.py: the script does not train. Name a training script.\n")


def test_help_has_the_script_s_options():
    done = layout(REPOSITORY / "model_pretrain.py", "--help")
    assert "./run layout" in done.output()
    assert "--tensor-parallel" in done.out
    assert "--hidden-size" in done.out


@given(st.lists(st.integers(0, 30), unique=True, min_size=1).map(sorted))
def test_listed_ranks(numbers):
    intervals = _listed(numbers).split(", ")
    found: list[int] = []
    for interval in intervals:
        if not interval.startswith("..."):
            first, _, last = interval.partition(" to ")
            found += range(int(first), int(last or first) + 1)
    assert found == numbers[: len(found)]
    is_cut = intervals[-1] == f"... ({len(numbers)} in all)"
    assert (len(found) < len(numbers)) == is_cut
    assert len(intervals) <= 4


@given(st.integers(0, 9 * 10**14))
def test_bytes_to_three_figures(number):
    value, unit = in_bytes(number).split()
    factor = 1000 ** ["B", "kB", "MB", "GB", "TB"].index(unit)
    assert float(value) * factor == pytest.approx(number, rel=0.0051)
    assert float(value) < 1000
