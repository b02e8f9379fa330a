"""Engines: data-parallel training implementations behind one protocol (`protocol.Engine`)."""
