"""The same training by other means, and by ours, for `benchmarks/peer.py` to time."""
