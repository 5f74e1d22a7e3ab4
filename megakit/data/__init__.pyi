from ..nemo.data_sampler import ExactDataSampler as ExactDataSampler
from ..nemo.datamodule import (
    MegatronDataModule as MegatronDataModule,
    WrappedDataLoader as WrappedDataLoader,
    another_name as another_name,
)
from .batches import fetch_batch as fetch_batch, fetch_samples as fetch_samples
from .blending import BlendedDataset as BlendedDataset
from .device import on_device as on_device, take as take
from .epochs import (
    BatchedMultiEpochDatasetWrapper as BatchedMultiEpochDatasetWrapper,
    IdentityMultiEpochDatasetWrapper as IdentityMultiEpochDatasetWrapper,
    MultiEpochDataset as MultiEpochDataset,
    MultiEpochDatasetResampler as MultiEpochDatasetResampler,
    MultiEpochDatasetWrapper as MultiEpochDatasetWrapper,
    SizedDataset as SizedDataset,
)
from .indices import EpochIndex as EpochIndex
from .permutation import permute as permute
from .random_effects import (
    bernoulli as bernoulli,
    bernoulli_like as bernoulli_like,
    normal as normal,
    normal_like as normal_like,
    sample_generator as sample_generator,
    uniform as uniform,
)
from .resampling import PRNGResampleDataset as PRNGResampleDataset
from .sampler import GlobalBatchSampler as GlobalBatchSampler
from .subsets import balanced_subset as balanced_subset
