"""docs/adapting.md, followed to the letter: a model of one's own from both templates."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megakit.testing import Ranks, distributed_model_parallel_state
from tests.docs.pages import blocks, read_page
from tests.scripts import REPOSITORY, read_csv, run

PAGE = REPOSITORY / "docs" / "adapting.md"
TEXT = PAGE.read_text()
#: The tutorial's commands, from a copy.
OURS = f"VENV={sys.prefix} {REPOSITORY / 'run'}"

STEPS, CHANGES = TEXT.split("\n## What to change for\n")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: The page's first command, and what it names for NeMo 2.
WITHOUT_NEMO, NEMO = "./run new ../my-model --from megatron", "./run new ../my-model --venv .venv"


def follow(text: str, folder: Path) -> Path:
    """Does what a part of the page says; returns the folder that it leads to."""
    for kind, code in BLOCK.findall(text):
        if kind == "bash":
            folder = shell(code, folder)
        elif kind == "diff":
            change_lines(code, folder)
        elif kind == "python":
            edit(code, folder)
        else:
            assert kind in ("text", "console"), f"a block of {kind}"
    return folder


def block(name: str) -> str:
    """The page's only block that is a file of this name."""
    (code,) = (code for _, code in BLOCK.findall(TEXT) if code.startswith(f"# {name}\n"))
    return code


def shell(code: str, folder: Path) -> Path:
    """Runs commands, looks for what they should print, and returns the folder they ended in."""
    # What CI exports for this project is not for the new one.
    code = code.replace("$tutorial/run", OURS)
    program = f"exec 2>&1\ntutorial={REPOSITORY}\n{code}\necho folder: $PWD"
    done = run("bash", "-euo", "pipefail", "-c", program, cwd=folder, VENV=None, PYTHON=None)
    said = done.out
    assert done.status == 0, f"{code}\n{said}"
    spaced = " ".join(said.split())
    for line in re.findall(r"^#> *(.*)$", code, re.MULTILINE):
        assert line in spaced, f"no {line!r} in\n{said}"
    return Path(re.findall(r"^folder: (.*)$", said, re.MULTILINE)[-1])


def edit(code: str, folder: Path) -> None:
    """Writes a file, or its end: its first line says which."""
    head, _, body = code.partition("\n")
    found = re.match(r"# (\S+\.py)(: at the end)?$", head)
    assert found, f"a block without its place: {head}"
    path = folder / found[1]
    # Never this project's own: a link would lead there.
    assert not path.resolve().is_relative_to(REPOSITORY)
    if found[2]:
        body = path.read_text() + "\n\n" + body
    path.write_text(body)


def change_lines(code: str, folder: Path) -> None:
    """Replaces lines of files; the first line names the files."""
    head, _, body = code.partition("\n")
    found = re.match(r"# (\S+(?:, \S+)*)$", head)
    assert found, f"changes without their file: {head}"
    for name in found[1].split(", "):
        path = folder / name
        assert not path.resolve().is_relative_to(REPOSITORY)
        source = path.read_text()
        for place in body.split("@@\n"):
            lines = place.splitlines(keepends=True)
            assert {line[0] for line in lines} <= set("+- "), place
            before, after = (
                "".join(line[1:] for line in lines if line[0] in s) for s in ("- ", "+ ")
            )
            assert source.count(before) == 1, f"not once in {name}:\n{before}"
            source = source.replace(before, after)
        path.write_text(source)


def follow_steps(folder: Path, new: str) -> Path:
    """Does what the seven steps say, with another first command; returns the copy's folder."""
    path = folder / "my-model"
    assert WITHOUT_NEMO in STEPS
    assert NEMO in STEPS
    text = STEPS.replace(WITHOUT_NEMO, f"{OURS} new {path} {new}").replace("../my-model", str(path))
    project = follow(text, REPOSITORY)
    summary = json.loads((project / "runs" / "predict" / "summary.json").read_text())
    assert summary["num_samples"] == 300
    assert summary["accuracy"] > 0.9
    return project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the seven steps lead to, on NeMo 2."""
    return follow_steps(tmp_path_factory.mktemp("adapting"), f"--venv {sys.prefix}")


@pytest.mark.long
def test_what_to_change_for(project: Path) -> None:
    follow(CHANGES, project)


@pytest.mark.long
def test_seven_steps_without_nemo(tmp_path: Path) -> None:
    """With this environment's Megatron-Core; `test_new` uses the packages of the template."""
    path = tmp_path / "my-model"
    older = f"sed -i 's/=3.12 /=3.11 /; s/core==0.19./core==/' {path}/run_setup.sh"
    follow_steps(tmp_path, f"--from megatron && {older} && {path}/run setup --venv {sys.prefix}")


#: A regression as the page's list has it: of the digits themselves.
REGRESSION = """
```diff
# data.py
-        label = take(self.labels, rows).long()
+        label = take(self.labels, rows).float().sub_(4.5).div_(2.9).unsqueeze(1)
```

```diff
# model_components.py
-from torchmetrics.classification import MulticlassAccuracy
+from torchmetrics import R2Score
+from torchmetrics.classification import MulticlassAccuracy
@@
-        return self.report(nn.functional.cross_entropy, forward_out, batch["label"], batch)
+        return self.report(nn.functional.mse_loss, forward_out, batch["label"], batch)
@@
-                self.digit_classifier = nn.Linear(config.latent_size, 10)
+                self.digit_classifier = nn.Linear(config.latent_size, 1)
@@
-        return {"accuracy": accuracy_of_classes()}
+        return {
+            "r2": ValidationMetric(R2Score(), lambda batch, output: (output, batch["label"]))
+        }
```

```python
# my_scores.py
ROWS
```

```diff
# model_predict.py
-    return run.finish(trainer)
+    from my_scores import rows, scores
+
+    return run.finish(trainer, rows=rows, scores=scores)
```

```bash
./run finetune --checkpoint none --max-steps 600 --lr 0.01 --latent-size 16
./run predict --precision 32
#> Samples predicted: 300.
#> r2 0.
./run tests
#> passed
```
"""


@pytest.mark.long
def test_a_regression(tmp_path: Path) -> None:
    """With the functions of docs/inference.md. `./run tests` compares layouts, and stops a run."""
    path = tmp_path / "my-regression"
    shell(f"{OURS} new {path} --venv {sys.prefix}", REPOSITORY)
    (functions,) = (
        code for code in blocks(read_page("docs/inference.md"), "python") if "def rows" in code
    )
    follow(REGRESSION.replace("ROWS\n", functions), path)
    summary = json.loads((path / "runs" / "predict" / "summary.json").read_text())
    assert (summary["num_samples"], summary["precision"]) == (300, "32")
    assert summary["r2"] > 0.8


#: Low-rank corrections as the page's list has them.
LOW_RANK = """
```python
# model_components.py: at the end
class LowRank(ExampleFineTuneModel):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if self.pre_process:
            with seeded(config.seed, "down"):
                self.down = nn.Linear(2 * 8 * 8, 4, bias=False)
            self.up = column_parallel_linear(config, 4, config.hidden_size, "up")
            nn.init.zeros_(self.up.weight)  # the first outputs are the frozen trunk's
            nn.init.zeros_(self.up.bias)
            self.linear1.register_forward_hook(self.correct)
        for name, weight in self.named_parameters():
            weight.requires_grad_(name.startswith(("down", "up", "digit_classifier")))

    def correct(self, layer: nn.Module, inputs: tuple[Tensor], output: tuple[Any, ...]) -> Any:
        correction, _ = self.up(self.down(inputs[0]))
        return output[0] + correction, *output[1:]


@dataclass
class LowRankConfig(ExampleFineTuneConfig):
    model_cls: type[LowRank] = LowRank
```

```bash
sed -e 's/ExampleFineTuneConfig/LowRankConfig/' \\
    -e 's/{"digit_classifier"}/{"digit_classifier", "down", "up"}/' model_finetune.py > lowrank.py
.venv/bin/python lowrank.py --max-steps 20 --output-dir runs/lowrank \\
    --checkpoint runs/pretrain/checkpoints/step=000300
#> 1,002 parameters, 20 steps
```
"""


@pytest.mark.long
def test_low_rank_corrections(project: Path) -> None:
    follow(LOW_RANK, project)


def test_norms_of_layers_before_clipping(ranks: Ranks, tmp_path: Path) -> None:
    """Their sum is the norm of the gradient, which is larger than that after clipping, 1."""
    ranks.run(train_with, block("my_callbacks.py"), tmp_path, world_size=1)
    rows = read_csv(tmp_path / "finetune" / "metrics.csv")
    assert len(rows) == 3
    for row in rows:
        squares = [float(row[name]) ** 2 for name in row if name.startswith("train_norm_")]
        assert len(squares) == 3  # two layers of the trunk, and the head
        assert sum(squares) ** 0.5 == pytest.approx(float(row["grad_norm"]), rel=1e-5)
    assert max(float(row["grad_norm"]) for row in rows) > 1


def train_with(code: str, folder: Path) -> None:
    """Fine-tunes three steps with the page's callback."""
    import model_finetune as script
    from megakit.training import train
    from tests.parallel import jobs

    names: dict[str, Any] = {}
    exec(code, names)
    sizes = {"max_steps": 3, "val_interval": 1, "save_interval": 3, "checkpoint": "none"}
    run = jobs.make_run(
        script.FINETUNE, jobs.options_of("finetune", folder, **sizes), jobs.layout()
    )
    module, data, trainer = jobs.built_by(script.finetune, run)
    trainer.callbacks.insert(0, names["GradientNorms"]())
    train(model=module, data=data, trainer=trainer)


@pytest.mark.long
def test_what_a_gather_does_to_gradients() -> None:
    """Of the page's model, and of the same model with Megatron's default."""
    code = block("my_tokens.py")
    default = code.replace(", tensor_parallel_output_grad=False", "")
    assert default != code
    with Ranks(2) as ranks:
        (alone,) = ranks.run(gradient_norm, code, world_size=1)
        assert ranks.run(gradient_norm, code) == pytest.approx([alone] * 2, rel=1e-5)
        assert ranks.run(gradient_norm, default) == pytest.approx([2 * alone] * 2, rel=1e-5)


def gradient_norm(code: str) -> float:
    """The norm of the gradient of the transformer of the page's model."""
    import torch
    from torch.distributed import get_world_size

    with distributed_model_parallel_state(tensor_model_parallel_size=int(os.environ["WORLD_SIZE"])):
        from examples.vit.vit_components import VitClassifierConfig

        names: dict[str, Any] = {}
        exec(code, names)
        config: Any = VitClassifierConfig(seed=1)
        config.tensor_model_parallel_size = get_world_size()
        config.sequence_parallel = get_world_size() > 1
        model = names["TokenClassifier"](config)
        tokens = torch.randn(8, 5, config.hidden_size, generator=torch.Generator().manual_seed(2))
        torch.nn.functional.cross_entropy(model(tokens), torch.arange(5)).backward()
        total = torch.zeros(())
        for weight in model.transformer.parameters():
            if getattr(weight, "sequence_parallel", False):
                torch.distributed.all_reduce(weight.grad)
            square = weight.grad.square().sum()
            if getattr(weight, "tensor_model_parallel", False):
                torch.distributed.all_reduce(square)
            total += square
        return float(total**0.5)
