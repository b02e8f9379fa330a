"""Starting the ranks of one run, watching them, and ending all of them on every path.

Torch-free, `agent` and `forked_ranks` apart. Empty: every rank imports this package on its way to
`rank`, and must be tied to its parent's life before it loads anything else.
"""
