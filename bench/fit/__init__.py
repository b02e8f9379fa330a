"""What a run would hold and send, without running it: real code on tensors without data."""
