"""Linear layers of Transformer Engine instead of torch's, with the same values.

Those of a decoder's layers are replaced; embedding, norms and head stay torch's. Parameters keep
their names. The package is not imported before a run needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from bench.models.decoder import Decoder, Recomputable
from bench.spec import DtypeName, LinearLayers

#: Transformer Engine's names of recipes.
_TE_RECIPES: Final = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


def exchange_layers(model: Decoder, linear: LinearLayers, compute: DtypeName) -> None:
    """Let Transformer Engine compute the projections of every layer, in place, if `linear` says so.

    compute: the dtype that Transformer Engine decodes its codes to. The layers stay on the meta
    device, and begin with zeros: values come from the model's rule.
    """
    if linear.kind == "torch":
        return
    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}.get(compute, "float32"))
    te = importlib.import_module("transformer_engine.pytorch")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    recipe = getattr(recipes, _TE_RECIPES[linear.recipe])()
    for parent in list(model.layers.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                with te.quantized_model_init(linear.quantised_weights, recipe, True):
                    sizes = (layer.in_features, layer.out_features)
                    options = {"bias": False, "params_dtype": dtype, "device": "meta"}
                    made = te.Linear(*sizes, init_method=nn.init.zeros_, **options)
                    setattr(parent, name, made)
    model.precision = lambda: te.autocast(enabled=True, recipe=recipe)
    for layer in model.layers:
        if isinstance(layer, Recomputable):
            layer.contexts = partial(recompute_contexts, te, recipe)


def recompute_contexts(
    te: Any, recipe: Any
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Transformer Engine's two phases, the second under the recipe of the forward pass.

    Its own checkpoint reads and sets random states, which a captured step cannot. Scales of delayed
    scaling follow whenever its autocast is left with gradients enabled, which would be once more
    per recomputed layer.
    """
    phases = importlib.import_module("transformer_engine.pytorch.distributed")
    forward, again = phases.get_activation_recompute_contexts()

    @contextmanager
    def recompute() -> Iterator[None]:
        with torch.no_grad(), te.autocast(enabled=True, recipe=recipe), torch.enable_grad(), again:
            yield

    return forward, recompute()
