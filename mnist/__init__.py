"""Contains the code for MNIST only: files, datasets, the user's pictures, the report, sizes."""
