"""How a program drives an engine: one module per engine, found by the engine's name."""
