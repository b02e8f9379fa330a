"""The command line: puts the packages together. Nothing imports it, and it imports lazily."""
