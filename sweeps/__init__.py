"""Many runs: a sweep file becomes a matrix, a plan and, through `bench.launch`, records."""
