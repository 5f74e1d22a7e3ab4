"""A vision transformer, made from the template: see README.md."""
