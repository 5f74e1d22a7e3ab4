"""What only MNIST has: its files, pictures of a user's own, the page about it, the tutorial."""
