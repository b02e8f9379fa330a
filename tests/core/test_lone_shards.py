"""R22 and R23: quantised weights where ranks hold nothing, and where one holds everything."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core import Float8Reference, MixedPrecisionPolicy, fully_shard_model
from oracle import transformer_engine as te
from oracle.models import Lone
from oracle.ranks import mesh_of_every_replica as mesh

pytestmark = pytest.mark.on_ranks


def output(primary: bool, ranks: int) -> Tensor:
    """Of a forward and the gradient of its input, under MXFP8 over `ranks` ranks."""
    torch.manual_seed(1)

    def layer(rows: int, columns: int, bias: bool) -> nn.Module:
        return te.Linear(rows, columns, bias=bias, params_dtype=torch.float32, device="cpu")

    codec = None if primary else Float8Reference("mxfp8")
    with te.installed():
        with te.quantized_model_init(primary, te.MXFP8BlockScaling(), True):
            model = nn.Sequential(Lone(layer), Lone(layer))
        model = fully_shard_model(
            model,
            device_mesh=mesh(ranks)["dp"],
            fsdp_unit_modules=[Lone],
            mixed_precision_policy=MixedPrecisionPolicy(torch.float32, weight_codec=codec),
        )
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        assert x.grad is not None
        return torch.cat((y.detach(), x.grad))


@pytest.mark.on_ranks(seconds=20.0)  # the bug is a rank that is waited for
@pytest.mark.parametrize("primary", [True, False])
def test_r22_a_rank_without_a_part_takes_part_in_the_maxima(primary: bool) -> None:
    """TransformerEngine#3348. On four ranks two hold no row; one rank holds both."""
    torch.testing.assert_close(output(primary, 4), output(primary, 1))


def test_r23_a_lone_shard_gets_all_payloads_back() -> None:
    """Codes and scales. Transformer Engine's MXFP8 under hybrid sharding got the first alone."""
    torch.testing.assert_close(output(False, 1), output(False, 2))
