"""Studies of runs and of layouts; no copy of the project has them."""
