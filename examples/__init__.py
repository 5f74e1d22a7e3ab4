"""Contains example models; each has its own folder."""
