"""Training tokens: three sources, and the rule that splits a global batch over ranks."""
