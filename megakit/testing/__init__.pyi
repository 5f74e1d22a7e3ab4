from .compare import DatasetDistributedNondeterministic as DatasetDistributedNondeterministic
from .compare import DatasetLocallyNondeterministic as DatasetLocallyNondeterministic
from .compare import assert_elements_equal as assert_elements_equal
from .datasets import (
    assert_dataset_compatible_with_megatron as assert_dataset_compatible_with_megatron,
)
from .datasets import assert_dataset_elements_not_equal as assert_dataset_elements_not_equal
from .fake_ranks import fake_ranks as fake_ranks
from .fake_ranks import mock_distributed_parallel_state as mock_distributed_parallel_state
from .parallel import distributed_model_parallel_state as distributed_model_parallel_state
from .ranks import RankError as RankError
from .ranks import Ranks as Ranks
