"""Layouts: what torchrun and srun say, what fits, and a remedy that works for what does not."""

import re
from itertools import product

import pytest

from megakit.job.cluster import Cluster
from megakit.job.layout import Layout, plan_layout, too_few_gpus
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.sizes import Sizes
from megakit.runtime.accelerator import Accelerator


def plan(options=None, cluster=None, **given):
    """The layout and the problems of a model of width 64 in two pipeline stages."""
    options, cluster = options or TrainingOptions(**given), cluster or Cluster()
    return plan_layout(options, cluster, Sizes(width=64, num_pipeline_stages=2))


def test_a_layout_s_sizes():
    layout = Layout(4, 2, tensor=2, pipeline=2, global_batch_size=64, micro_batch_size=8)
    assert (layout.world_size, layout.data) == (8, 2)
    assert str(layout) == "8 processes: tensor 2 x pipeline 2 x data 2"


class TestWhatFits:
    def test_defaults_are_one_process(self):
        layout, problems = plan()
        assert problems == []
        assert layout == Layout(1, 1, 1, 1, global_batch_size=256, micro_batch_size=256)

    def test_the_micro_batch_is_the_largest_divisor_that_measurement_favours(self):
        class Options(TrainingOptions):
            largest_micro_batch = 100

        layout, problems = plan(Options(global_batch_size=360, devices=2))
        assert problems == []
        assert layout.micro_batch_size == 90

    def test_prediction_takes_any_batch(self):
        layout, problems = plan(CommonOptions(micro_batch_size=77, devices=3))
        assert problems == []
        assert (layout.micro_batch_size, layout.data, layout.global_batch_size) == (77, 3, 231)

    def test_what_the_starter_decided_counts(self):
        cluster = Cluster("torchrun", rank=1, devices=2, num_nodes=2)
        layout, problems = plan(cluster=cluster, tensor_parallel=2)
        assert problems == []
        assert (layout.world_size, layout.tensor, layout.data) == (4, 2, 2)
        assert plan(cluster=cluster, devices=2, num_nodes=2)[1] == []

    @pytest.mark.parametrize("devices", range(1, 9))
    def test_every_product(self, devices):
        """RefusedError exactly where the arithmetic does not work out."""
        for tensor, pipeline, batch, micro in product(
            (1, 2, 3, 4, 8), (1, 2, 3), (1, 6, 16, 24), (None, 1, 2, 3, 4)
        ):
            layout, problems = plan(
                devices=devices,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                global_batch_size=batch,
                micro_batch_size=micro,
            )
            fits = devices % (tensor * pipeline) == 0 and 64 % tensor == 0 and pipeline <= 2
            data = devices // (tensor * pipeline)
            if fits:
                fits = batch % (data * (micro or 1)) == 0
            assert (problems == []) == fits, (devices, tensor, pipeline, batch, micro, problems)
            if fits:
                assert layout.tensor * layout.pipeline * layout.data == layout.world_size
                assert batch % (layout.micro_batch_size * layout.data) == 0
                assert micro in (None, layout.micro_batch_size)


class TestWhatDoesNot:
    def test_model_parallelism_divides_the_processes(self):
        _, problems = plan(devices=6, tensor_parallel=2, pipeline_parallel=2, global_batch_size=240)
        (problem,) = problems
        for part in ("--tensor-parallel 2", "--pipeline-parallel 2", "= 4", "6 x 1 = 6"):
            assert part in problem
        assert remedied(problem, devices=6, tensor_parallel=2, pipeline_parallel=2) == []

    def test_data_parallel_ranks_divide_the_global_batch(self):
        (problem,) = plan(devices=4, global_batch_size=30)[1]
        assert "--global-batch-size 30" in problem
        assert "4" in problem.split(":", 1)[1]
        assert remedied(problem, devices=4, global_batch_size=30) == []

    def test_the_micro_batch_divides_a_rank_s_share(self):
        (problem,) = plan(devices=2, global_batch_size=24, micro_batch_size=5)[1]
        for part in ("--micro-batch-size 5", "2 data-parallel ranks", "= 10", "24"):
            assert part in problem
        assert remedied(problem, devices=2, global_batch_size=24, micro_batch_size=5) == []

    def test_more_gpus_than_there_are(self):
        layout, problems = plan(devices=4)
        assert problems == []
        (problem,) = too_few_gpus(layout, Accelerator("gpu", "a GPU", count=1), Cluster())
        for part in ("--devices 4", "has 1 GPU,", "--accelerator cpu"):
            assert part in problem
        assert too_few_gpus(layout, Accelerator("gpu", "a GPU", count=4), Cluster()) == []
        assert too_few_gpus(layout, Accelerator("cpu", "a CPU", count=1), Cluster()) == []

    def test_gpus_that_only_other_processes_see(self, monkeypatch):
        """As with Slurm's `--gpus-per-task`."""
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        layout, _ = plan(devices=4)
        gpu = Accelerator("gpu", "a GPU", count=1)
        assert too_few_gpus(layout, gpu, Cluster("srun", num_gpus=4)) == []
        (problem,) = too_few_gpus(layout, gpu, Cluster("srun", num_gpus=2))
        assert "this machine has 2 GPUs" in problem

    def test_machines_with_unequal_numbers_of_processes(self):
        cluster = Cluster("srun", rank=0, devices=2, num_nodes=2, num_surplus=1)
        (problem,) = plan(cluster=cluster)[1]
        for part in ("srun started 5 processes on 2 machines", "--ntasks-per-node"):
            assert part in problem

    def test_several_machines_need_a_starter(self):
        (problem,) = plan(num_nodes=2)[1]
        assert "--num-nodes 2" in problem
        assert "torchrun" in problem

    def test_options_that_contradict_the_starter(self):
        cluster = Cluster("srun", rank=0, devices=2, num_nodes=2)
        problems = plan(cluster=cluster, devices=4, num_nodes=1)[1]
        devices, nodes = (problem for problem in problems if "srun" in problem)
        assert devices.startswith("--devices 4")
        assert nodes.startswith("--num-nodes 1")
        assert all(re.search(r"with 2\b", problem) for problem in (devices, nodes))

    def test_all_at_once(self):
        problems = plan(devices=4, tensor_parallel=3, pipeline_parallel=3, num_nodes=2)[1]
        text = "\n".join(problems)
        for part in ("--num-nodes 2", "--tensor-parallel 3 x", "--tensor-parallel 3:", "stages"):
            assert part in text
        # no number of processes would help
        for impossible in ({"tensor_parallel": 3}, {"pipeline_parallel": 3}):
            assert "Use --devices" not in "\n".join(plan(devices=4, **impossible)[1])


def remedied(problem, **given):
    """What is still wrong once the user has done what the message says."""
    found = re.search(r"Use --devices (\d+)|--(\S+) \d+.*Try (\d+)\.", problem)
    assert found, problem
    if found[1]:
        given["devices"] = int(found[1])
    else:
        given[found[2].replace("-", "_")] = int(found[3])
    return plan(**given)[1]
