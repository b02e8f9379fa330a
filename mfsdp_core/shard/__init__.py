"""Flat buffers, the views of tensors in them, and shards as DTensors."""
