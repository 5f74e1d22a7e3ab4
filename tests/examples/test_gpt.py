"""The language model: its text, its parts by hand, and its two scripts as a user starts them."""

import math
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from examples.gpt.text_files import TextOptions, read_splits
from megakit.errors import UserError
from megakit.testing import assert_dataset_compatible_with_megatron
from tests.scripts import REPOSITORY, read_csv, read_json, run_python, run_script

PRETRAIN, SAMPLE = "examples/gpt/model_pretrain.py", "examples/gpt/model_sample.py"
SMALL = ("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--block-size", 16)
TRAINED = (*SMALL, "--max-steps", 200, "--lr", 0.01, "--precision", "32", "--accelerator", "cpu")


@pytest.fixture(scope="module")
def gpt(megatron: None) -> ModuleType:
    """`gpt_components`, which can be imported once an accelerator was chosen."""
    from examples.gpt import gpt_components

    return gpt_components


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files in two folders, an empty file and hidden ones."""
    for name, content in {
        "a.txt": b"first file\n",
        "b/c.txt": b"second\n" * 3,
        "b/d": bytes(range(256)),
        "b/empty": b"",
        ".git/x": b"hidden",
        "b/.y": b"hidden",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def problem(text: Path) -> str:
    with pytest.raises(UserError) as caught:
        TextOptions(text=text).fingerprint()
    (told,) = caught.value.problems
    return str(told)


# --- The text -------------------------------------------------------------------------------------


def test_the_last_file_is_for_validation(folder: Path) -> None:
    assert read_splits(folder) == (b"first file\n" + b"second\n" * 3, bytes(range(256)))


def test_every_fiftieth_file_is_for_validation(tmp_path: Path) -> None:
    for number in range(101):
        (tmp_path / f"{number:03}").write_bytes(b"%03d " % number)
    training, validation = read_splits(tmp_path)
    assert validation.split() == [b"100", b"050", b"000"]
    assert len(training) == 98 * 4


def test_the_end_of_a_single_file_is_for_validation(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(bytes(range(250)))
    assert read_splits(path) == (bytes(range(245)), bytes(range(245, 250)))


def test_the_name_depends_on_the_bytes(folder: Path) -> None:
    options = TextOptions(text=folder)
    name = options.fingerprint()
    options.check_unchanged(name)
    (folder / ".git/x").write_bytes(b"changed")
    assert options.fingerprint() == name
    (folder / "b/d").write_bytes(bytes(256))
    with pytest.raises(UserError, match="changed since this command began"):
        options.check_unchanged(name)


def test_texts_that_cannot_be_used(tmp_path: Path) -> None:
    assert "No such file" in problem(tmp_path / "absent")
    assert "contains no text" in problem(tmp_path)
    (tmp_path / "short").write_bytes(b"abc")
    assert "has 3 and 0 bytes for training and validation" in problem(tmp_path)


# --- Its parts ------------------------------------------------------------------------------------


def test_blocks_keep_the_rules(gpt: ModuleType, folder: Path) -> None:
    data = gpt.TextDataModule(folder, 8, 2, 4)
    data.setup("fit")
    assert_dataset_compatible_with_megatron(data.train_set)
    assert_dataset_compatible_with_megatron(data.val_set)
    assert len(data.train_set) == math.ceil((11 + 21 - 1) / 8)


def test_each_byte_but_the_first_is_a_label_once(gpt: ModuleType) -> None:
    content = os.urandom(103)
    blocks = gpt.TextBlocks(content, 10)
    samples = [blocks[index] for index in range(len(blocks))]
    tokens, labels = (
        [
            token
            for sample in samples
            for token, real in zip(sample[name].tolist(), sample["loss_mask"], strict=True)
            if real
        ]
        for name in ("tokens", "labels")
    )
    assert (bytes(tokens), bytes(labels)) == (content[:-1], content[1:])
    assert blocks[-1]["idx"] == 10
    assert blocks[-1]["loss_mask"].tolist() == [1, 1] + [0] * 8


def small_model(gpt: ModuleType, **options: Any) -> Any:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "block_size": 16}
    return gpt.GptConfig(**sizes | options).configure_model().eval()


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_sees_earlier_tokens_only(gpt: ModuleType, tied: bool) -> None:
    model = small_model(gpt, tied_weights=tied, init_method_std=0.3)
    tokens = torch.randint(256, (3, 16))
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 9:] = 0
    others = model(changed)
    torch.testing.assert_close(others[:, :9], logits[:, :9])
    assert (others[:, 9:] != logits[:, 9:]).all(dim=-1).any()
    losses = model(tokens, labels=tokens)
    torch.testing.assert_close(
        losses, torch.nn.functional.cross_entropy(logits.mT, tokens, reduction="none")
    )


def test_tied_weights_are_one_weight(gpt: ModuleType) -> None:
    counts = [
        sum(weight.numel() for weight in small_model(gpt, tied_weights=tied).parameters())
        for tied in (True, False)
    ]
    assert counts[1] - counts[0] == 256 * 32


def test_the_loss_is_also_given_in_bits(gpt: ModuleType) -> None:
    loss = gpt.NextTokenLoss()
    losses, mask = torch.rand(4, 8), (torch.rand(4, 8) > 0.5).float()
    *_, report = loss.forward({"loss_mask": mask}, losses)
    means = loss.reduce([report])
    expected = (losses * mask).sum() / mask.sum()
    torch.testing.assert_close(means["loss"], expected)
    torch.testing.assert_close(means["bits_per_byte"], expected / math.log(2))


# --- Sampling -------------------------------------------------------------------------------------


def test_stored_keys_and_values_change_nothing(gpt: ModuleType) -> None:
    """Also where the text becomes longer than a block, and half of the block is forgotten."""
    from examples.gpt.sampling import NextLogits, ParallelNextLogits, generate

    class Recomputed(NextLogits):
        def forget(self) -> None:
            self.tokens = torch.empty(2, 0, dtype=torch.int64)

        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            self.tokens = torch.cat([self.tokens, tokens], dim=1)
            assert self.tokens.shape[1] <= self.block_size
            logits: torch.Tensor = self.model(self.tokens)[:, -1]
            return logits

    model = small_model(gpt, init_method_std=0.3)
    prompt = torch.randint(256, (2, 5))
    texts = [
        generate(kind(model, 2), prompt, 40, temperature=0.7, seed=1)
        for kind in (Recomputed, NextLogits, ParallelNextLogits)
    ]
    assert texts[0].shape == (2, 45)
    assert texts[0][:, :5].equal(prompt)
    for text in texts[1:]:
        assert text.equal(texts[0])
    assert len(texts[0][0, 5:].unique()) > 3


def test_choices(gpt: ModuleType) -> None:
    from examples.gpt.sampling import NextLogits, generate

    class Fixed(NextLogits):
        def __init__(self) -> None:
            self.block_size = 8

        def forget(self) -> None:
            pass

        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.arange(256.0).expand(len(tokens), 256)

    prompt = torch.zeros(1, 1, dtype=torch.int64)
    greedy = generate(Fixed(), prompt, 5, temperature=0)
    assert greedy.tolist() == [[0, 255, 255, 255, 255, 255]]
    wide = generate(Fixed(), prompt, 2000, temperature=1000, top_k=3)
    assert set(wide[0, 1:].tolist()) == {253, 254, 255}
    assert generate(Fixed(), prompt, 50, seed=1).equal(generate(Fixed(), prompt, 50, seed=1))
    assert not generate(Fixed(), prompt, 50, seed=1).equal(generate(Fixed(), prompt, 50, seed=2))


# --- The scripts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of a text that repeats after 45 bytes, so blocks of 16 begin anywhere in it."""
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog.\n" * 500)
    run_script(PRETRAIN, *TRAINED, "--text", folder / "text", "--output-dir", folder).output()
    return folder


@pytest.mark.long
def test_it_learns(runs: Path) -> None:
    last = read_csv(runs / "pretrain" / "metrics.csv")[-1]
    assert float(last["val_bits_per_byte"]) < 1
    assert read_json(runs / "pretrain" / "summary.json")["steps"] == 200


@pytest.mark.long
def test_a_sample(runs: Path) -> None:
    done = run_script(
        *(SAMPLE, "--output-dir", runs, "--prompt", "the quick", "--num-bytes", 60),
        *("--temperature", 0, "--accelerator", "cpu"),
    )
    path = Path(done.output().strip())
    text = path.read_text()
    assert text.startswith("the quick brown fox")
    assert len(text) == 69
    assert text in done.err


def test_options_that_do_not_fit_together(tmp_path: Path) -> None:
    done = run_script(
        *(PRETRAIN, "--hidden-size", 30, "--sequence-parallel", "--output-dir", tmp_path / "runs"),
        *("--num-layers", 3, "--pipeline-parallel", 2, "--devices", 2),
    )
    vocabulary = run_script(PRETRAIN, "--tensor-parallel", 3, "--devices", 3)
    assert "has to divide the number of tokens in the vocabulary, 256" in vocabulary.err
    assert done.status == 2
    assert "--hidden-size 30: has to be a multiple of --num-attention-heads 4. Try 32." in done.err
    assert "--sequence-parallel: needs tensor-parallel ranks" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_sample_on_ranks_that_would_repeat_it(runs: Path) -> None:
    done = run_script(SAMPLE, "--output-dir", runs, "--devices", 2)
    assert done.status == 2
    assert "data-parallel ranks would all generate the same text" in done.err


@pytest.mark.long
def test_the_program_without_process_groups(runs: Path) -> None:
    """Of README.md: it generates text, and its export computes the same for any size."""
    page = (REPOSITORY / "examples" / "gpt" / "README.md").read_text()
    program = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    checkpoint = run_script(PRETRAIN, *TRAINED, "--text", runs / "text", "--output-dir", runs).out
    program = program.replace("runs/gpt/pretrain/checkpoints/step=001200", checkpoint.strip())
    code = """
exported = torch.export.load("gpt.pt2").module()
for tokens in (text, text[:, :1], text[:1, :5]):
    torch.testing.assert_close(exported(tokens), model(tokens), rtol=0, atol=1e-5)
"""
    done = run_python("-c", program + code, cwd=runs, PYTHONPATH=str(REPOSITORY))
    assert "import" in done.output()
