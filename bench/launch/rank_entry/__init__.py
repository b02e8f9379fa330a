"""The folder that every rank has on its path, for the one module in it."""
