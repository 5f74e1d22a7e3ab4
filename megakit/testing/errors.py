"""Defines the errors for datasets whose samples differ between reads or between processes."""


class DatasetLocallyNondeterministic(AssertionError):  # noqa: N818  # BioNeMo's name
    """One process reads different samples at the same index."""


class DatasetDistributedNondeterministic(AssertionError):  # noqa: N818  # BioNeMo's name
    """One process reads equal samples, but the ranks of a job may read different ones."""
