"""Images of your own, in a folder for each class: see README.md."""
