"""Pure statistics of run medians: exact tests, intervals, multiplicity, sample sizes. No files.

A sample is one run (its steady-state median); values are natural logarithms of positive quantities,
so that a difference is a ratio and "5 % slower" and "5 % faster" are mirror images.
"""
