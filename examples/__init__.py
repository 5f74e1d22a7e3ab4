"""Models made from the template; each lives in a folder of its own."""
