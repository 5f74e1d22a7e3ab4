"""Layouts: what torchrun and srun say, what fits, and a remedy that works for what does not."""

import json
import re
from itertools import product

import pytest

from megakit.job.cluster import Cluster
from megakit.job.layout import Layout, other_layout, plan_layout, too_few_gpus
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.sizes import Sizes
from megakit.runtime.accelerator import Accelerator
from model_pretrain import PRETRAIN
from tests.fabricate import make_run
from tests.scripts import run_script


def plan(options=None, cluster=None, width=64, num_pipeline_stages=2, num_heads=0, **given):
    sizes = Sizes(width, num_heads, num_pipeline_stages)
    return plan_layout(options or TrainingOptions(**given), cluster or Cluster(), sizes)


class TestLayout:
    def test_sizes(self):
        layout = Layout(4, 2, tensor=2, pipeline=2, global_batch_size=64, micro_batch_size=8)
        assert (layout.world_size, layout.data) == (8, 2)
        assert str(layout) == "8 processes: tensor 2 x pipeline 2 x data 2"

    def test_one_process(self):
        assert str(Layout(1, 1, 1, 1, 64, 8)) == "1 process"


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
        layout, _ = plan(CommonOptions())
        assert layout.micro_batch_size == CommonOptions.largest_micro_batch

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

    def test_tensor_parallelism_divides_the_width(self):
        (problem,) = plan(devices=3, tensor_parallel=3)[1]
        assert "--tensor-parallel 3" in problem
        assert "64" in problem

    def test_stages(self):
        (problem,) = plan(devices=4, pipeline_parallel=4)[1]
        assert "--pipeline-parallel 4" in problem
        assert "2 stages" in problem

    def test_stages_hold_equally_many_layers(self):
        (problem,) = plan(devices=3, pipeline_parallel=3, num_pipeline_stages=4)[1]
        assert "--pipeline-parallel 3" in problem
        assert problem.endswith("can be split into 1 or 2 or 4 stages. Try 2.")
        assert plan(devices=2, pipeline_parallel=2, num_pipeline_stages=4)[1] == []

    def test_tensor_parallelism_deals_out_whole_heads(self):
        (problem,) = plan(devices=8, tensor_parallel=8, num_heads=4)[1]
        assert problem.startswith("--tensor-parallel 8: has to divide the number of attention head")
        assert problem.endswith("heads, 4. Try 4.")
        assert plan(devices=4, tensor_parallel=4, num_heads=4)[1] == []
        (problem,) = plan(devices=3, tensor_parallel=3, num_heads=4)[1]  # nor the width
        assert "heads" in problem

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
        chosen = Accelerator("gpu", "a GPU", count=2)  # by CUDA_VISIBLE_DEVICES
        assert too_few_gpus(layout, chosen, Cluster("srun", num_gpus=4))
        # CUDA uses only the first of several MIG devices.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c,MIG-d")
        assert too_few_gpus(layout, gpu, Cluster("srun", num_gpus=4))

    def test_machines_with_unequal_numbers_of_processes(self):
        cluster = Cluster("srun", rank=0, devices=2, num_nodes=2, num_surplus=1)
        (problem,) = plan(cluster=cluster)[1]
        for part in ("srun started 5 processes on 2 machines", "--ntasks-per-node"):
            assert part in problem

    def test_several_machines_need_a_starter(self):
        (problem,) = plan(num_nodes=2)[1]
        assert "--num-nodes 2" in problem
        assert "torchrun" in problem

    @pytest.mark.parametrize("starter", ["torchrun", "srun"])
    def test_options_that_contradict_the_starter(self, starter):
        cluster = Cluster(starter, rank=0, devices=2, num_nodes=2)
        problems = plan(cluster=cluster, devices=4, num_nodes=1)[1]
        named = [problem for problem in problems if starter in problem]
        assert len(named) == 2
        assert "--devices 4" in named[0]
        assert "--num-nodes 1" in named[1]
        assert all(re.search(r"with 2\b", problem) for problem in named)

    def test_all_at_once(self):
        problems = plan(devices=4, tensor_parallel=3, pipeline_parallel=3, num_nodes=2)[1]
        text = "\n".join(problems)
        for part in ("--num-nodes 2", "--tensor-parallel 3 x", "--tensor-parallel 3:", "stages"):
            assert part in text
        # no number of processes would help
        for impossible in ({"tensor_parallel": 3}, {"pipeline_parallel": 3}):
            assert "Use --devices" not in "\n".join(plan(devices=4, **impossible)[1])

    def test_no_arithmetic_with_ranks_that_cannot_be(self):
        """7 processes of 2 each make no 3 data-parallel ranks that a batch has to suit."""
        (problem,) = plan(devices=7, tensor_parallel=2)[1]
        assert "--global-batch-size" not in problem

    @pytest.mark.parametrize(
        "name", ["devices", "num_nodes", "tensor_parallel", "pipeline_parallel", "micro_batch_size"]
    )
    @pytest.mark.parametrize("value", [0, -2])
    def test_numbers_below_one_are_the_options_own_problem(self, name, value):
        options = TrainingOptions(**{name: value})
        layout, problems = plan(options)
        assert len(options.problems()) == 1
        assert problems == []
        assert str(layout)


def test_a_remedy_for_numbers_beyond_all_sense_is_found_at_once():
    (problem,) = plan(global_batch_size=10**15, micro_batch_size=10**15 - 1)[1]
    assert problem.endswith("Try 16000000.")


def remedied(problem, **given):
    """What is still wrong once the user has done what the message says."""
    found = re.search(r"Use --devices (\d+)|--(\S+) \d+.*Try (\d+)\.", problem)
    assert found, problem
    if found[1]:
        given["devices"] = int(found[1])
    else:
        given[found[2].replace("-", "_")] = int(found[3])
    return plan(**given)[1]


class TestFinishedRun:
    """A command that names another layout than its finished run's trains nothing, and says so."""

    def remark(self, tmp_path, parallel, cluster=None, **given):
        summary = tmp_path / "summary.json"
        summary.write_text(json.dumps({"parallel": parallel}))
        options, cluster = TrainingOptions(**given), cluster or Cluster()
        return other_layout(plan(options, cluster)[0], options, cluster, summary)

    def test_another_layout(self, tmp_path):
        one = {"tensor": 1, "pipeline": 1, "data": 1}
        assert self.remark(tmp_path, one, devices=2, tensor_parallel=2) == (
            "The finished run used 1 process. This command names 2 processes: tensor 2 x pipeline "
            "1 x data 1, and trained nothing under this layout. To train under it, add --fresh or "
            "another --output-dir."
        )

    @pytest.mark.parametrize(
        ("given", "is_named"),
        [
            ({}, False),  # the next command of README, which names no layout
            ({"devices": 1}, True),
            ({"devices": 2, "pipeline_parallel": 2}, True),
            ({"devices": 2, "tensor_parallel": 2}, False),  # the same
            ({"devices": 4, "tensor_parallel": 2}, True),
        ],
    )
    def test_only_a_named_layout_that_differs(self, tmp_path, given, is_named):
        two = {"tensor": 2, "pipeline": 1, "data": 1}
        assert (self.remark(tmp_path, two, **given) is not None) is is_named

    def test_a_launcher_names_a_layout(self, tmp_path):
        one = {"tensor": 1, "pipeline": 1, "data": 1}
        torchrun = Cluster(launcher="torchrun", devices=2)
        remark = self.remark(tmp_path, one, torchrun)
        assert "This command names 2 processes: tensor 1 x pipeline 1 x data 2" in remark
        assert self.remark(tmp_path, {**one, "data": 2}, torchrun) is None

    @pytest.mark.parametrize("content", ["", "{}", "[]", '{"parallel": 2}', '{"parallel": {}}'])
    def test_a_summary_without_a_layout_says_nothing(self, tmp_path, content):
        (tmp_path / "summary.json").write_text(content)
        options = TrainingOptions(devices=2)
        layout = plan(options)[0]
        assert other_layout(layout, options, Cluster(), tmp_path / "summary.json") is None
        assert other_layout(layout, options, Cluster(), tmp_path / "absent.json") is None

    def test_the_script_says_so(self, tmp_path, pretrain_options):
        directory = make_run(PRETRAIN, pretrain_options, (100,))
        one = {"tensor": 1, "pipeline": 1, "data": 1}
        directory.summary.write_text(json.dumps({"parallel": one}))
        where = ("--output-dir", pretrain_options.output_dir)
        common = (*where, "--dataset", "digits", "--accelerator", "cpu")
        plain, other = (
            run_script("model_pretrain.py", *common, *layout)
            for layout in ((), ("--devices", 2, "--tensor-parallel", 2))
        )
        assert plain.output() == other.output() == f"{directory.best_checkpoint()}\n"
        done = f"pretrain is already done: {directory.path}. --fresh starts over.\n"
        assert plain.err == done
        told = "".join(line for line in other.err.splitlines(True) if "processes share" not in line)
        assert told.startswith(f"{done}The finished run used 1 process. This command names 2 ")
        assert told.count("\n") == 2
