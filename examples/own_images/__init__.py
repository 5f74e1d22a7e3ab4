"""Trains on your own images, in one folder per class; see README.md."""
