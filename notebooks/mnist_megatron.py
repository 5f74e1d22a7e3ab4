# %% [markdown]
# # What NeMo and Megatron require of a model
#
# This notebook trains the tutorial's autoencoder, turns its encoder into a digit classifier, and
# classifies the test images. Every step runs through NVIDIA NeMo 2 and Megatron-Core, as it would
# for a language model on thousands of GPUs. These frameworks require more of a model than plain
# PyTorch does, so each section takes one requirement, shows the class in `model_components.py` that
# meets it, and shows what it does in a run of your own.
#
# All cells together take one to two minutes on two CPU cores. You can stop a cell that trains (■):
# run it again, and the training resumes.

# %%
import sys
import tempfile
from pathlib import Path
from typing import Any

folders = (Path.cwd(), *Path.cwd().parents)
ROOT = next(folder for folder in folders if (folder / "model_components.py").is_file())
sys.path.insert(0, str(ROOT))
RUNS = Path(tempfile.mkdtemp())  # for checkpoints and metrics

# %% [markdown]
# NeMo and Megatron assume an NVIDIA GPU. `import_stack` imports them. Without a GPU, it also
# replaces the functions that would fail: those of torch before the import, those of NeMo and
# Megatron after it (`megakit/runtime` lists them, with reasons).

# %%
from megakit.job.notebook import import_stack, open_run
from mnist.sizes import SizeOptions

import_stack(width=SizeOptions.hidden_size)

# %% [markdown]
# The images are those of the scripts: MNIST in the folder that the variable `MNIST_DATA_DIR` names,
# else in the project's folder `data`. If MNIST is not there, the next cell downloads it. Without a
# network, the cell chooses `digits`, scans from scikit-learn, unless the variable names a folder.

# %%
from mnist.files import find_dataset, named_folder

folder = named_folder()
DATA_DIR = folder or ROOT / "data"
DATASET = find_dataset(DATA_DIR, "mnist" if folder else "auto", print)
common: Any = {"data_dir": DATA_DIR, "dataset": DATASET, "output_dir": RUNS}
print(f"This notebook trains and tests with the dataset {DATASET}.")

# %% [markdown]
# A few terms are enough to read on. A *rank* is one process of the job, usually with one GPU. Ranks
# can share the work in three ways:
#
# - *Tensor-parallel* ranks each hold a part of each sharded layer.
# - *Pipeline-parallel* ranks each hold some of the layers, called a *pipeline stage*.
# - *Data-parallel* ranks each hold a copy of the model and process different samples. A *micro
#   batch* is the set of samples in one forward pass of a rank.
#
# # 1. Pretrain
#
# ## A sample depends only on its index
#
# In plain PyTorch, a `DataLoader` shuffles, and a random transform draws from a global generator.
# With Megatron, neither works: all ranks of one copy of the model load each sample on their own,
# and nothing checks that they load the same one. A resumed run, too, has to load the samples that
# the uninterrupted run would have loaded. So the dataset has to compute each sample, its place in
# the order and all its random effects from seed, epoch and index.
#
# Our autoencoder learns to restore images from which a fifth of the pixels was dropped.
# `DropPixels` computes which ones, from seed, epoch and index:

# %%
from model_components import DropPixels, MNISTDataModule
from notebooks.showing import show_source

show_source(DropPixels)

# %%
from megakit.data import EpochIndex
from model_pretrain import PRETRAIN, PretrainOptions

MICRO_BATCH = 32  # samples per forward pass; the global batch of a step has 128 samples
options = PretrainOptions(**common, max_steps=600, micro_batch_size=MICRO_BATCH, val_interval=100)
data = MNISTDataModule(
    DATA_DIR,
    batch_size=MICRO_BATCH,
    dataset=DATASET,
    global_batch_size=options.global_batch_size,
    corruption=options.corruption,
)
data.setup("fit")
print("Images at the places 0 to 7:", [int(data.mnist_train[i]["idx"]) for i in range(8)])

# %%
import torch

from notebooks.showing import draw_images, show_figure

epochs = data.mnist_train.dataset  # the training images, by (epoch, index)
views = [epochs[EpochIndex(epoch, 7)] for epoch in (0, 1, 2, 0)]
shown = torch.stack([views[0]["data"][0], *(view["corrupted"][0] for view in views)])
titles = ("image 7", "epoch 0", "epoch 1", "epoch 2", "epoch 0 again")
others, again = int((shown[1] != shown[2]).sum()), int((shown[1] != shown[4]).sum())
show_figure(
    draw_images(shown, 5, titles),
    f"Image 7: {others} pixels differ between epochs 0 and 1, {again} in epoch 0 again.",
)

# %% [markdown]
# If a dataset breaks this contract, Megatron reports no error, and the ranks train on different
# samples. megakit therefore has a function that raises an error instead, for example if a dataset
# draws from torch's global generator:

# %%
from megakit.testing import assert_dataset_compatible_with_megatron

assert_dataset_compatible_with_megatron(epochs)

# %% [markdown]
# ## A data sampler states two batch sizes
#
# NeMo reads the samples in the order of their indices, and divides the samples of each step over
# micro batches and data-parallel ranks. For this, NeMo's strategy requires a `data_sampler` in
# the data module, with a *micro* and a *global* batch size. The global batch is what one optimizer
# step sees: the micro batches of all data-parallel ranks together.

# %%
show_source(MNISTDataModule.setup, MNISTDataModule.with_random_effects)
sampler = data.data_sampler  # a subclass of NeMo's MegatronDataSampler
{
    "micro batch size": sampler.micro_batch_size,
    "global batch size": sampler.global_batch_size,
    "micro batches of a step on one rank": sampler.global_batch_size // sampler.micro_batch_size,
}

# %% [markdown]
# ## A config builds the model late
#
# A layer has to know its tensor-parallel rank before it can allocate its part of the weights, and a
# process knows this rank only after NeMo's strategy has set up the *process groups*, the sets of
# ranks that communicate. So the Lightning module receives a config instead of a model, and the
# Trainer calls `configure_model` when the groups exist.
# Until then, the Lightning module has no parameters. The config also names the class of the model
# and the class of the loss.

# %%
from megakit.training import cosine_annealing, megatron_adam, train
from model_components import BionemoLightningModule, ExampleGenericConfig, PretrainConfig

show_source(ExampleGenericConfig, PretrainConfig, BionemoLightningModule.configure_model)


def build_module(options: PretrainOptions) -> BionemoLightningModule:
    """Returns the autoencoder's Lightning module, with optimizer and learning-rate schedule."""
    return BionemoLightningModule(
        config=PretrainConfig(seed=options.seed),
        optimizer=megatron_adam(options.lr, cosine_annealing(options.max_steps)),
    )


module = build_module(options)
{"parameters before training": sum(weight.numel() for weight in module.parameters())}

# %% [markdown]
# ## Megatron's schedule calls `training_step`
#
# In plain PyTorch, your loop calls `loss.backward()`. Here you call `train`, which is megakit's
# counterpart of NeMo's `llm.train`: it calls the `fit` of the trainer, the loop of the trainer
# calls the strategy, and the strategy calls Megatron's *schedule*. The schedule runs forward and
# backward over all micro batches, in the order that the pipeline requires, and calls your
# `training_step` once for each of them. `training_step` returns the model's *output*; a loss
# object, on the last pipeline stage, computes the loss from it.
#
# `build_trainer` makes the trainer, NeMo's `nl.Trainer`, with parallel sizes, precision, logger and
# callbacks.

# %%
from model_trainer import build_trainer

show_source(
    BionemoLightningModule.training_step,
    BionemoLightningModule.training_loss_reduction,
    build_trainer,
)


# %% [markdown]
# The next cell trains, and a callback records the micro batches of the first step.

# %%
import lightning.pytorch as pl


class Recorder(pl.Callback):
    """Records the micro batches and the loss of the first step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.hook = pl_module.register_forward_hook(self.on_forward)

    def on_forward(self, module: Any, inputs: Any, output: Any) -> None:
        shapes = {name: tuple(value.shape) for name, value in output.items()}
        self.seen.append(f"training_step of {tuple(inputs[0]['data'].shape)} returns {shapes}")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: object) -> None:
        if len(self.seen) == 4:
            self.hook.remove()
            self.seen.append(f"the loss reduces the four reports to {float(outputs['loss']):.5f}")


recorder = Recorder()
with open_run(PRETRAIN, options) as run:  # checks the options, locks the folder of the run
    trainer = build_trainer(run, callbacks=[recorder])
    train(model=module, data=data, trainer=trainer, resume=run.resume)
print(*recorder.seen, sep="\n")


# %% [markdown]
# Four micro batches of 32 samples make one global batch of 128, and one step of the optimizer. Here
# is the loss of every tenth of the 600 steps:

# %%
from notebooks.showing import draw_curves

draw_curves(RUNS / "pretrain", "mean squared error")

# %% [markdown]
# ## A loss is an object with `forward` and `reduce`
#
# Because a step consists of several micro batches on several ranks, one function of a loss is not
# enough. `forward` takes one micro batch, and returns the loss that Megatron backpropagates and a
# report for the log. `reduce` then computes one value from the reports of all micro batches and all
# data-parallel ranks. This value must not depend on how the samples are divided into micro batches,
# as the next cell checks.

# %%
import numpy as np

from megakit.data import fetch_batch
from megakit.training import MeanLossReduction
from model_components import MSELossReduction

show_source(MSELossReduction, MeanLossReduction.reduce)
checkpoint = Path(trainer.checkpoint_callback.best_model_path)
autoencoder = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
loss, values = MSELossReduction(), {}
for size in (128, 64, 32):
    batches = [fetch_batch(data.mnist_val, np.arange(i, i + size)) for i in range(0, 128, size)]
    with torch.no_grad():
        reports = [loss.forward(batch, autoencoder(batch["data"]))[1] for batch in batches]
    values[f"micro batches of {size}"] = round(float(loss.reduce(reports)), 6)
values

# %% [markdown]
# ## A checkpoint has a context
#
# `torch.save` writes the tensors of one process. A distributed checkpoint (`weights/`) instead
# stores the name and the full shape of each tensor, and which file contains which part, so any
# layout of ranks can load it. NeMo adds the *context*: the settings of the config, such as the
# sizes of the model. megakit adds `manifest.json`, which marks the checkpoint as complete and
# stores its validation loss.

# %%
from megakit.checkpoints import read_manifest, read_model_settings

for file in sorted(checkpoint.rglob("*")):
    if file.is_file():
        print(f"{file.stat().st_size:>9,}  {file.relative_to(checkpoint.parent)}")

settings, manifest = read_model_settings(checkpoint), read_manifest(checkpoint)
print("\ncontext: ", {name: settings[name] for name in ("hidden_size", "latent_size")})
print("manifest:", {name: getattr(manifest, name) for name in ("model", "step", "val_loss")})

# %% [markdown]
# ## A gradient is in `main_grad`
#
# Megatron's `DistributedDataParallel` adds the gradients of all micro batches to one buffer, so
# that a single all-reduce, a sum that all data-parallel ranks receive, synchronizes them. Its hooks
# add each gradient to `weight.main_grad`, a part of the buffer, and set `weight.grad` to None. So
# `weight.grad` is None after the backward pass. Only an optimizer of Megatron reads the buffer, so
# the module gets its optimizer from `megatron_adam`. This optimizer's step, in float32, first sets
# `weight.grad` to `weight.main_grad`.
#
# The next cell looks at the 8 weights after the backward pass of a step, and again after the
# optimizer's step:

# %%
from dataclasses import replace

seen: dict[str, dict[str, int]] = {}


def look(moment: str) -> Any:
    """Returns a hook that counts the gradients of the weights at a moment of a step."""

    def hook(trainer: Any, pl_module: Any, *args: object) -> None:
        weights = list(pl_module.parameters())
        seen[moment] = {
            "grad is None": sum(weight.grad is None for weight in weights),
            "grad is main_grad": sum(weight.grad is weight.main_grad for weight in weights),
            "main_grad is not 0": sum(bool(weight.main_grad.any()) for weight in weights),
        }

    return hook


hooks = pl.callbacks.LambdaCallback(
    on_before_optimizer_step=look("after the backward pass"),
    on_train_batch_end=look("after the optimizer's step"),
)
one_step = replace(options, output_dir=Path(tempfile.mkdtemp()), max_steps=1, precision="32")
with open_run(PRETRAIN, one_step) as run:
    module, trainer = build_module(one_step), build_trainer(run, callbacks=[hooks])
    train(model=module, data=data, trainer=trainer, resume=run.resume)
seen

# %% [markdown]
# # 2. Reconstructions
#
# The autoencoder reconstructs 784 pixels from 3 numbers, which give the rough shape but not always
# the right digit. The upper row shows the input, without a fifth of its pixels; the lower row, the
# reconstruction.

# %%
from model_components import PretrainModel

show_source(PretrainModel)
samples = torch.utils.data.default_collate([epochs[EpochIndex(9, i)] for i in range(12)])
with torch.no_grad():
    restored = autoencoder(samples["corrupted"])["x_hat"].reshape(-1, 28, 28)
figure = draw_images(torch.cat([samples["corrupted"][:, 0], restored]), 12)
error = float(((restored - samples["data"][:, 0]) ** 2).mean())
result = f"Twelve corrupted digits and their reconstructions; mean squared error {error:.3f}."
show_figure(figure, result)

# %% [markdown]
# # 3. Fine-tune
#
# The classifier has the trunk of the autoencoder and another head. Its config names the weights
# that the checkpoint need not contain: those whose names begin with `digit_classifier`. If the
# checkpoint lacks any other weight, loading it is an error, because a renamed layer would otherwise
# keep its random initial weights without any message. (This check is megakit's choice.)

# %%
from model_components import ExampleFineTuneConfig, ExampleFineTuneModel

show_source(ExampleFineTuneModel, ExampleFineTuneConfig)
classifier = ExampleFineTuneConfig(
    initial_ckpt_path=str(checkpoint),
    initial_ckpt_skip_keys_with_these_prefixes={"digit_classifier"},
).configure_model()
theirs = dict(autoencoder.named_parameters())
{
    name: "loaded" if name in theirs and weight.equal(theirs[name]) else "new"
    for name, weight in classifier.named_parameters()
}

# %% [markdown]
# The next cell calls the function of the script, as `./run finetune` does. The Lightning module is
# the class from before: only the config names another model and another loss.

# %%
from model_finetune import FINETUNE, FinetuneOptions, finetune

show_source(finetune)
with open_run(FINETUNE, FinetuneOptions(**common, max_steps=1000, val_interval=200)) as run:
    classifier_checkpoint = finetune(run)
draw_curves(RUNS / "finetune", "cross entropy")

# %% [markdown]
# # 4. Predict
#
# Prediction also runs through the strategy, because the model may be sharded. The schedule requires
# batches of equal size, so the last batch is padded, and `loss_mask` is 0 for the padding. Several
# ranks predict different images, so `predict_step` returns the index of each image with its output,
# and at the end `predict` checks that each image is there exactly once.

# %%
from model_predict import PREDICT, PredictOptions, predict

show_source(BionemoLightningModule.predict_step)
with open_run(PREDICT, PredictOptions(**common)) as run:
    table = np.loadtxt(predict(run), delimiter=",", skiprows=1)
idx, label, prediction = table[:, :3].astype(int).T
{
    "rows": len(idx),
    "different images": len(set(idx)),
    "accuracy": round(float((label == prediction).mean()), 4),
}

# %% [markdown]
# These are the mistakes with the highest probabilities. Below each image are its label, its
# prediction and the probability of the prediction.

# %%
from megakit.training import Predictions
from mnist.figure_style import percent
from notebooks.showing import draw_mistakes

data.setup("predict")
worst = Predictions(idx, label, table[:, 3:]).mistakes(20)
show_figure(
    draw_mistakes(data.mnist_test.images, worst),
    f"{len(worst)} wrong predictions with probabilities of at least "
    f"{percent(worst.probabilities.max(axis=1).min())}.",
)


# %% [markdown]
# The trunk maps each image to a point *z* in 3-D space, and the head classifies by its position.
# Pretraining (the first figure) places images of similar shape together; fine-tuning (the second)
# places images of equal label together.

# %%
from mnist.figures import latent_space

classifier = ExampleFineTuneConfig(initial_ckpt_path=str(classifier_checkpoint)).configure_model()
batch = fetch_batch(data.mnist_test, np.arange(300 if DATASET == "digits" else 2000))
with torch.no_grad():
    points = {
        "pretrained": autoencoder(batch["data"])["z"].numpy(),
        "fine-tuned": classifier(batch["data"], return_latent=True)[1].numpy(),
    }
labels = batch["label"].numpy()
for model, z in points.items():
    means = np.stack([z[labels == digit].mean(axis=0) for digit in range(10)])
    nearest = np.linalg.norm(z[:, None] - means, axis=2).argmin(axis=1)
    space = latent_space(z, labels)
    space.dpi = 72
    show_figure(
        space,
        f"The latent space of the {model} encoder, by digit. The mean point of its own label is "
        f"the closest for {(nearest == labels).mean():.0%} of the images.",
    )

# %% [markdown]
# # 5. Stop and resume
#
# Long runs are stopped, by a time limit, by maintenance or by their user. To resume exactly, a run
# needs a dataset that computes sample *n* without the samples before it, a sampler that stores the
# number of consumed samples, and a checkpoint with the states of optimizer and schedule. The next
# cell runs 100 steps without a stop, and then the same run with a Ctrl-C after step 50.

# %%
import signal

from megakit.errors import Stopped

short = replace(options, max_steps=100, precision="32", val_interval=50, save_interval=100)


class StopAt(pl.Callback):
    """Sends the signal of Ctrl-C after a given step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step == self.step:
            signal.raise_signal(signal.SIGINT)


def run_to(name: str, stop_at: int | None = None, loss_cls: Any = MSELossReduction) -> Path:
    """Pretrains for 100 steps, or resumes this run; returns the last checkpoint."""
    module = build_module(short)
    module.config.loss_cls = loss_cls
    with open_run(PRETRAIN, replace(short, output_dir=RUNS / name)) as run:
        trainer = build_trainer(run, callbacks=[StopAt(stop_at)])
        train(model=module, data=data, trainer=trainer, resume=run.resume)
    return Path(trainer.checkpoint_callback.last_model_path)


whole = run_to("whole")
try:
    run_to("stopped", stop_at=50)
except Stopped as stop:
    print(f"Stopped: {stop}")
resumed = run_to("stopped")


# %%
def largest_difference(checkpoint: Path, other: Path) -> float:
    """Returns the largest difference between the weights of two checkpoints of pretraining."""
    configs = (PretrainConfig(initial_ckpt_path=str(path)) for path in (checkpoint, other))
    weights = [list(config.configure_model().parameters()) for config in configs]
    return max(float((a - b).detach().abs().max()) for a, b in zip(*weights, strict=True))


tables = [(RUNS / run / "pretrain/metrics.csv").read_text() for run in ("whole", "stopped")]
{
    "metrics.csv is the same": tables[0] == tables[1],
    "weights are the same": largest_difference(whole, resumed) == 0,
}

# %% [markdown]
# # 6. Shard the model
#
# ## Tensor parallel: parts of each layer
#
# Two consecutive linear layers are sharded along the 64 features between them. The first is *column
# parallel*: each rank computes 32 of its outputs. The second is *row parallel*: each rank uses its
# 32 inputs, and one all-reduce sums the results. ReLU acts on each feature separately, so it needs
# no communication in between; a softmax over the 64 features would.
#
# For this, `ExampleModelTrunk` uses Megatron's parallel layers instead of `nn.Linear`. A layer that
# is not sharded is replicated, so each rank holds all of its weights. Megatron does not make the
# replicas equal; therefore `ExampleFineTuneModel` creates its head inside megakit's `seeded`.

# %%
from model_components import ExampleModelTrunk

show_source(ExampleModelTrunk)
first, second, images = autoencoder.linear1, autoencoder.linear2, batch["data"]
with torch.no_grad():
    parts = []
    for half in (slice(0, 32), slice(32, 64)):  # the features of rank 0 and of rank 1
        hidden = torch.relu(images.flatten(1) @ first.weight[half].T + first.bias[half])
        parts.append(hidden @ second.weight[:, half].T)
    z_of_two = sum(parts) + second.bias  # the all-reduce
    z_of_one = autoencoder(images)["z"]
difference = float((z_of_two - z_of_one).abs().max())
print(f"largest difference of z: {difference:.1e}")
{"two halves give the z of one process": difference < 1e-4}

# %% [markdown]
# ## Pipeline parallel: some of the layers
#
# The first stage holds the encoder and sends *z* to the second stage, which holds the decoder.
# Megatron's schedule does not know the model, so it requires `model_type` and `set_input_tensor`,
# to which it passes the output of the previous stage. `pre_process` and `post_process` tell a model
# whether it is the first or the last stage.

# %%
encoder = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
decoder = PretrainConfig(initial_ckpt_path=str(checkpoint)).configure_model()
encoder.post_process = decoder.pre_process = False  # as on stage 0 and on stage 1
with torch.no_grad():  # this cell does the work of the schedule
    sent = encoder(batch["data"])  # (sequence, batch, hidden), the shape that stages exchange
    decoder.set_input_tensor([sent])
    of_stages = decoder(batch["data"])["x_hat"]
    of_one = autoencoder(batch["data"])["x_hat"]
print("sent from stage 0 to stage 1:", tuple(sent.shape))
{"outputs that differ": int((of_stages != of_one).sum())}

# %% [markdown]
# ## The same run on two processes
#
# A notebook is a single process, so it can be only one rank. The next cell therefore starts
# `model_pretrain.py` twice: on one process, and on two with `--devices 2 --tensor-parallel 2`. Both
# repeat section 5, with the same seed and the same 100 steps. Without two GPUs, both use the CPU,
# because runs on different devices cannot be compared. The checkpoint of the two processes stores
# each sharded tensor in two parts, and one process loads the full tensors.

# %%
import subprocess

from torch.distributed.checkpoint.filesystem import FileSystemReader

from notebooks.showing import column


def run_script(name: str, processes: int) -> Path:
    """Pretrains with the script, each layer on all processes; returns the last checkpoint."""
    device = "auto" if torch.cuda.device_count() > 1 else "cpu"
    command = f"model_pretrain.py --dataset {DATASET} --max-steps 100 --val-interval 50"
    command += f" --micro-batch-size {MICRO_BATCH} --precision 32 --accelerator {device}"
    command += f" --devices {processes} --tensor-parallel {processes}"
    folders = ["--data-dir", str(DATA_DIR), "--output-dir", str(RUNS / name)]
    arguments = [sys.executable, *command.split(), *folders]
    done = subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


one, two = run_script("one", 1), run_script("two", 2)

# %%
print("step   1 process    2 processes")
losses = column(RUNS / "one/pretrain", "train_loss")
losses_of_two = column(RUNS / "two/pretrain", "train_loss")[1]
for step, loss_of_one, loss_of_two in zip(*losses, losses_of_two, strict=True):
    if step in (1, 10, 50, 100):
        print(f"{step:>4.0f}   {loss_of_one:.8f}   {loss_of_two:.8f}")

saved: Any = FileSystemReader(two / "weights").read_metadata().state_dict_metadata
for name in ("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"):
    sizes = [tuple(chunk.sizes) for chunk in saved[f"module.{name}"].chunks]
    print(f"{name:<15} {tuple(saved[f'module.{name}'].size)!s:<10} in parts {sizes}")
difference = largest_difference(one, two)
print(f"largest difference of a weight: {difference:.1e}")
{"weights are equal up to rounding": difference < 1e-4}

# %% [markdown]
# # Next steps
#
# - Write it yourself: `./run exercise` in a terminal lists fourteen parts of a Megatron training to
#   write or to mend, from the loss to the distributed optimizer. It compares your losses with those
#   of plain PyTorch, and a wrong number tells it which mistake you made
#   ([the course](../docs/course/index.md)).
# - Repeat section 6 with a pipeline. In `run_script`, replace `--tensor-parallel` with
#   `--pipeline-parallel`, then call `run_script("pipeline", 2)`: its two processes hold the encoder
#   and the decoder.
# - Break a requirement: `./run experiment` lists twelve, each with the error or the wrong number
#   that you get without it.
# - `./run tutorial` runs the three scripts, and `./run tensorboard` shows their curves.
# - [Chapter 3](../docs/course/03_ranks.md) shows which rank holds which weights, and
#   [docs/data.md](../docs/data.md) describes what a dataset needs.
# - For your model, follow [docs/adapting.md](../docs/adapting.md).
