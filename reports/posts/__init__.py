"""Text to paste elsewhere: the block of a pull request."""
