"""Texts to paste elsewhere: the block of a pull request, and a matrix by axes."""
