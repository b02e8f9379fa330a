"""One run of a model under an engine: spec, resolve, launch, loop, meters, record."""
