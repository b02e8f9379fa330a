"""The only room that calls torch.distributed's collectives. Memory is passed in, not made."""
