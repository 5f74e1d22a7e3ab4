"""What our strategy does at a step besides what NeMo's does: it looks at the gradient's norm."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megakit.checkpoints import read_manifest
from megakit.checkpoints.manifest import verify
from megakit.errors import UserError
from tests.scripts import read_csv, run_script


@pytest.fixture
def strategy(megatron: None) -> Any:
    from megakit.job.layout import Layout
    from megakit.training.trainer import build_strategy

    strategy = build_strategy(Layout(1, 1, 1, 1, 8, 8))
    strategy.trainer = SimpleNamespace(global_step=6)
    return strategy


@pytest.fixture
def step(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step of an optimizer that has found the gradient to have a norm."""
    from lightning.pytorch.strategies import DDPStrategy

    def step(norm: Any) -> Any:
        monkeypatch.setattr(DDPStrategy, "optimizer_step", lambda *args, **kwargs: (1, norm, None))
        return strategy.optimizer_step(None, None)

    return step


@pytest.mark.parametrize("norm", [0.0, 0.125, 1e30, None])
def test_a_finite_norm_is_remembered(strategy: Any, step: Any, norm: float | None) -> None:
    assert step(norm) == (1, norm, None)
    assert strategy.grad_norm == norm


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_none_ends_training(step: Any, norm: float) -> None:
    step(0.5)
    with pytest.raises(RuntimeError, match=rf"^Step 7: the gradient's norm is {norm}\. .*--lr"):
        step(norm)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_in_the_first_step_the_weights_are_the_reason(step: Any, norm: float) -> None:
    """A checkpoint may hold finite weights that no gradient can be computed with."""
    with pytest.raises(
        UserError, match=rf"^Step 7: the gradient's norm is {norm} with the weights"
    ):
        step(norm)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_may_be_a_tensor(step: Any, norm: float) -> None:
    import torch

    step(torch.tensor(0.5))
    with pytest.raises(RuntimeError, match="Step 7"):
        step(torch.tensor(norm))


def test_training_that_goes_wrong_keeps_its_checkpoints(tmp_path: Path) -> None:
    done = run_script(
        *("model_pretrain.py", "--dataset", "digits", "--data-dir", tmp_path / "no-data"),
        *("--accelerator", "cpu", "--precision", "32", "--output-dir", tmp_path),
        *("--lr", "100", "--max-steps", 5, "--save-interval", 1, "--val-interval", 5),
    )
    assert done.status == 1
    assert done.out == ""
    (line,) = [line for line in done.err.splitlines() if "gradient's norm" in line]
    assert "Step 2: the gradient's norm is inf." in line
    assert "Earlier checkpoints are not changed. Use a lower --lr." in line
    run = tmp_path / "pretrain"
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == "step=000001"
    assert verify(checkpoint) == read_manifest(checkpoint)
    assert [row["step"] for row in read_csv(run / "metrics.csv")] == ["1"]


# --- Which of the module's methods take part ------------------------------------------------------


class Module:
    def training_step(self, batch: Any) -> None: ...
    def forward_step(self, batch: Any) -> None: ...
    def data_step(self, iterator: Any) -> None: ...
    def training_loss_reduction(self) -> None: ...


class OtherModule(Module):
    def training_data_step(self, iterator: Any) -> None: ...


class Chunks(list[Any]):
    """As much of NeMo's MegatronParallel as a step takes."""

    def __init__(self, module: Any) -> None:
        chunk = SimpleNamespace(config=SimpleNamespace(), zero_grad_buffer=lambda: None)
        super().__init__([chunk])
        self.module = module
        self.steps: list[dict[str, Any]] = []
        self.callbacks = SimpleNamespace(callbacks={})

    def training_step(self, iterator: Any, **functions: Any) -> float:
        self.steps.append(functions)
        return 0.5


@pytest.fixture
def searched(megatron: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each search of NeMo's, by what was looked for."""
    from nemo.lightning.megatron_parallel import _ModuleStepFunction

    searched: list[str] = []
    for name in ("from_data_step", "from_forward_step", "from_loss_reduction"):
        original = getattr(_ModuleStepFunction, name)

        def find(*args: Any, name: str = name, original: Any = original) -> Any:
            searched.append(name)
            return original(*args)

        monkeypatch.setattr(_ModuleStepFunction, name, find)
    return searched


def names(functions: dict[str, Any]) -> dict[str, str]:
    return {key: function.name for key, function in functions.items()}


def test_the_module_is_searched_once(strategy: Any, searched: list[str]) -> None:
    strategy.model = chunks = Chunks(Module())
    for _ in range(3):
        assert strategy.training_step(iter(())) == 0.5
    assert sorted(searched) == ["from_data_step", "from_forward_step", "from_loss_reduction"]
    first, *others = chunks.steps
    assert others == [first, first]
    assert names(first) == {
        "data_step": "data_step",
        "forward_step": "training_step",
        "loss_reduction": "training_loss_reduction",
    }


def test_another_module_is_searched_anew(
    strategy: Any, searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trainer may fit several."""
    from nemo import lightning as nl

    monkeypatch.setattr(nl.MegatronStrategy, "setup_megatron_parallel", lambda *args: None)
    for module, expected in ((Module(), "data_step"), (OtherModule(), "training_data_step")):
        strategy.model = chunks = Chunks(module)
        strategy.setup_megatron_parallel(strategy.trainer)
        strategy.training_step(iter(()))
        assert names(chunks.steps[0])["data_step"] == expected
    assert len(searched) == 6


def test_what_a_step_is_given_is_what_nemo_would_find(strategy: Any) -> None:
    from nemo.lightning.megatron_parallel import _ModuleStepFunction as Find

    for module in (Module(), OtherModule()):
        strategy.model = Chunks(module)
        strategy.__dict__.pop("_training_functions", None)
        theirs = {
            "data_step": Find.from_data_step(module, "training"),
            "forward_step": Find.from_forward_step(module, "training"),
            "loss_reduction": Find.from_loss_reduction(module, "training"),
        }
        ours = strategy._training_functions
        assert {k: vars(v) for k, v in ours.items()} == {k: vars(v) for k, v in theirs.items()}


# --- What a validation logs ----------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [None, 2**24 + 2, 0])
def test_the_mean_of_many_steps_is_exact(strategy: Any, num_tokens: int | None) -> None:
    """By Lightning's own mean. Sums in float32 would have an error of 1e-5 of the loss."""
    import torch
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

    results = _ResultCollection(training=False)

    def log(name: str, value: Any, **options: Any) -> None:
        results.log("validation_step", name, value, **options)

    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 4

    class WithLoss:
        def loss_reduction(self) -> Any:
            return SimpleNamespace(num_tokens=num_tokens)

    remaining = iter(values)
    chunks: Any = Chunks(WithLoss())
    chunks.validation_step = lambda iterator, loss_reduction: next(remaining)
    strategy.parallel_devices = [torch.device("cpu")]
    strategy._lightning_module = SimpleNamespace(log=log)
    strategy.model = chunks
    for _ in values:
        strategy.validation_step(iter(()))
    assert strategy.validated_names == ["loss"]
    (mean,) = results.metrics(on_step=False)["callback"].values()
    assert abs(float(mean) - float(values.double().mean())) < 1e-12


# --- Which steps call Megatron's schedule directly ------------------------------------------------


def listens(**methods: Any) -> Any:
    from nemo.lightning.megatron_parallel import CallbackMethods

    return type("Listener", (CallbackMethods,), methods)()


def sampler(base: Any = None, **options: Any) -> Any:
    from megakit.data import ExactDataSampler

    sizes = {"seq_len": 1, "micro_batch_size": 4, "global_batch_size": 8, "output_log": False}
    return (base or ExactDataSampler)(**sizes | options)


def sampler_that_listens() -> Any:
    from megakit.data import ExactDataSampler

    class Sampler(ExactDataSampler):
        def on_megatron_step_start(self, step: Any) -> Any: ...

    return sampler(Sampler)


@pytest.mark.parametrize(
    ("make_sampler", "listener", "num_stages", "is_direct"),
    [
        (sampler, {}, 1, True),
        (sampler_that_listens, {}, 1, False),
        (lambda: sampler(output_log=True), {}, 1, False),  # NeMo's own metrics
        (lambda: sampler(rampup_batch_size=[4, 4, 100]), {}, 1, False),
        (
            lambda: SimpleNamespace(**vars(sampler())),
            {},
            1,
            False,
        ),  # of a class that we do not know
        (sampler, {"on_megatron_step_end": lambda self, step: None}, 1, False),
        (sampler, {}, 2, False),
    ],
    ids=["plain", "listening sampler", "log", "ramp-up", "unknown", "listener", "stages"],
)
def test_steps_that_nemo_has_to_take(
    strategy: Any,
    monkeypatch: pytest.MonkeyPatch,
    make_sampler: Any,
    listener: dict[str, Any],
    num_stages: int,
    is_direct: bool,
) -> None:
    """A direct call is quicker, and passes over whatever listens to NeMo's events."""
    from megatron.core import parallel_state

    stages = "get_pipeline_model_parallel_world_size"
    monkeypatch.setattr(parallel_state, stages, lambda: num_stages)
    monkeypatch.setattr(strategy, "_run_schedule", lambda iterator: "direct")
    strategy.data_sampler = make_sampler()
    strategy.model = chunks = Chunks(Module())
    event = "on_megatron_step_end"
    listeners = [listens(**listener), strategy.data_sampler]
    if isinstance(strategy.data_sampler, SimpleNamespace):
        listeners.pop()
    chunks.callbacks.callbacks = {event: listeners, "on_megatron_step_start": listeners}
    assert strategy.training_step(iter(())) == ("direct" if is_direct else 0.5)


@pytest.mark.parametrize(("scope", "is_direct"), [("full", True), ("full_iteration", False)])
def test_a_cuda_graph_of_the_whole_step(
    strategy: Any, monkeypatch: pytest.MonkeyPatch, scope: str, is_direct: bool
) -> None:
    """NeMo records it around Megatron's schedule, which a direct call would leave out."""
    from megatron.core import parallel_state

    stages = "get_pipeline_model_parallel_world_size"
    monkeypatch.setattr(parallel_state, stages, lambda: 1)
    monkeypatch.setattr(strategy, "_run_schedule", lambda iterator: "direct")
    strategy.data_sampler = sampler()
    strategy.model = chunks = Chunks(Module())
    config = SimpleNamespace(enable_cuda_graph=True, cuda_graph_scope=scope)
    chunks.append(SimpleNamespace(config=config, zero_grad_buffer=lambda: None))
    assert strategy.training_step(iter(())) == ("direct" if is_direct else 0.5)


@pytest.mark.parametrize("is_own", [True, False])
def test_shapes_are_exchanged_once_with_our_sampler_only(
    strategy: Any, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """NeMo's makes smaller last batches. After the strategy's end, another may use the config."""
    from lightning.pytorch.strategies import DDPStrategy
    from nemo import lightning as nl
    from nemo.lightning.pytorch.plugins import MegatronDataSampler

    from megakit.data import ExactDataSampler
    from megakit.training import stage_shapes

    config = SimpleNamespace(**{stage_shapes.CONSTANT: True})

    def set_up(self: Any, trainer: Any) -> None:
        self.model = self.megatron_parallel = Chunks(Module())
        self.model[0].config = config
        self.model.teardown_ddp = lambda: None

    monkeypatch.setattr(nl.MegatronStrategy, "setup_megatron_parallel", set_up)
    monkeypatch.setattr(DDPStrategy, "teardown", lambda self: None)
    strategy.data_sampler = sampler(ExactDataSampler if is_own else MegatronDataSampler)
    strategy.setup_megatron_parallel(None)
    assert (stage_shapes._SHAPES in vars(config)) == is_own
    strategy.teardown()
    assert vars(config) == {stage_shapes.CONSTANT: True}
