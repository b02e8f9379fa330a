"""What records and plans say, before anything is compared."""
