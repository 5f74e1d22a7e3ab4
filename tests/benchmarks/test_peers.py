"""What we compare our speed with does the same work, and is not much faster."""

import math
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY

STEPS = 30
DIGITS = {"dataset": "digits", "data_dir": Path("no-data")}


@pytest.fixture
def steps(benchmark):
    return benchmark("steps")


@pytest.mark.long
def test_all_compute_the_same_losses_in_float32(steps):
    job = {**DIGITS, "steps": STEPS, "warm_up": 5, "precision": "32", "corruption": 0.3}
    job["lr"] = 1e-2  # so that schedule, decay and clipping weigh
    ours = steps.train("ours", 1, **job, every_loss=True)["losses"]
    assert len(ours) == STEPS
    assert ours[-1] < 0.9 * ours[0]
    for peer in ("torch", "lightning"):
        losses = steps.train(peer, 1, **job, every_loss=True)["losses"]
        assert steps.difference(losses, ours) < 1e-5
    # The same comparison notices other mathematics.
    for other in ({"lr": 1.01e-2}, {"corruption": 0.31}, {"seed": 43}):
        losses = steps.train("torch", 1, **{**job, **other}, every_loss=True)["losses"]
        assert steps.difference(losses, ours) > 1e-4


@pytest.mark.long
def test_ours_is_at_least_half_as_fast_as_plain_lightning(steps):
    # The quickest stretch of three starts each, in turn: this machine may have other work to do.
    quickest = {"ours": 0.0, "lightning": 0.0}
    for _ in range(3):
        for peer, best in quickest.items():
            told = steps.train(peer, 1, **DIGITS, steps=300, warm_up=50)
            quickest[peer] = max(best, told["quickest_steps_per_second"])
    assert quickest["ours"] > 0.5 * quickest["lightning"]


@pytest.mark.long
def test_the_published_way_runs_through_its_three_stages(steps, mnist_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Lightning leaves a folder of logs where it predicts
    script = str(REPOSITORY / "benchmarks" / "peers" / "published.py")
    common = ["--data-dir", str(mnist_dir), "--folder", str(tmp_path)]
    checkpoint: list[str] = []
    for stage in ("pretrain", "finetune"):
        options = [stage, *common, *checkpoint, "--steps", "4", "--interval", "2"]
        told = steps.told_by([script, *options], 1)
        assert len(told["ends"]) == len(told["losses"]) == 4
        assert all(map(math.isfinite, told["losses"]))
        checkpoint = ["--checkpoint", told["checkpoint"]]
    told = steps.told_by([script, "predict", *common, *checkpoint, "--score"], 1)
    assert 0.0 < told["accuracy"] < 0.5  # four steps teach next to nothing


def test_the_schedule_and_adam_are_ours(benchmark):
    from megakit.runtime import use_accelerator

    use_accelerator("cpu")
    import torch

    from megakit.training import cosine_annealing, megatron_adam

    shared = benchmark("peers.job")
    job = shared.Job(steps=200)
    config = megatron_adam(job.lr).config
    betas = (config.adam_beta1, config.adam_beta2)
    assert {"betas": betas, "eps": config.adam_eps} == shared.ADAM
    assert (config.weight_decay, config.clip_grad) == (shared.WEIGHT_DECAY, shared.CLIP)

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = cosine_annealing(job.steps).scheduler(None, optimizer)["lr_scheduler"]["scheduler"]
    for step in range(job.steps):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(job.lr_factor(step), abs=1e-12)
        optimizer.step()
        schedule.step()
