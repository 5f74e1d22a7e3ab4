"""Studies of runs and of layouts; projects made by `./run new` lack them."""
