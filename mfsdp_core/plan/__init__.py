"""Pure planning: no process group, no device, no torch. Dtypes are names and sizes here."""
