"""FSDP2 whose AdamW takes torch's foreach path over DTensors, which a CPU does not by itself."""

from bench.engines.fsdp2 import Fsdp2Engine


class ForeachAdam(Fsdp2Engine):
    """As `fsdp2`, with foreach=True in every parameter group."""

    def __init__(self, model, resolved, device):
        super().__init__(model, resolved, device)
        for group in self.optimizer.param_groups:
            group["foreach"] = True
