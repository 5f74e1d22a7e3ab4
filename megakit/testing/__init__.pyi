from .datasets import (
    DatasetDistributedNondeterministic as DatasetDistributedNondeterministic,
    DatasetLocallyNondeterministic as DatasetLocallyNondeterministic,
    assert_dataset_compatible_with_megatron as assert_dataset_compatible_with_megatron,
    assert_dataset_elements_not_equal as assert_dataset_elements_not_equal,
)
from .parallel_state import distributed_model_parallel_state as distributed_model_parallel_state
from .ranks import RankError as RankError, Ranks as Ranks
from .samples import assert_elements_equal as assert_elements_equal
