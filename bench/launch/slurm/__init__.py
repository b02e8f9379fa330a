"""Slurm: jobs are written and submitted by submitit, asked about by squeue, run their own runs."""
