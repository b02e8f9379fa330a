"""Models under training: a native Llama. Architectures as numbers are `bench.spec.ModelShape`."""
