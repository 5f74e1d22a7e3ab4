"""Trains a vision transformer on MNIST; see README.md."""
