"""Small wrong changes of mfsdp_core, and which cases and tests meet them."""
