"""The tests; a package, so that ranks import it and not the `tests` of an installed package."""
