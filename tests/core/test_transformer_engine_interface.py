"""What the project takes Transformer Engine to be, against the one that is installed.

Its sources are read, not imported: that needs CUDA. `make venv` brings them to any machine.
"""

from __future__ import annotations

import ast
import inspect
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from optional import files_of_transformer_engine

from mfsdp_core.precision.transformer_engine import GATHERED
from oracle import fused_adam, quantised_tensors, transformer_engine

pytestmark = pytest.mark.needs("transformer_engine_files")

#: Functions and classes of the stand-in, and the files that have the true ones.
WHERE = {
    "quantize_master_weights": "pytorch/tensor/utils.py",
    "post_all_gather_processing": "pytorch/tensor/utils.py",
    "clear_columnwise_cache": "pytorch/tensor/utils.py",
    "quantized_model_init": "pytorch/quantization.py",
    "autocast": "pytorch/quantization.py",
    "get_activation_recompute_contexts": "pytorch/distributed.py",
    "is_fp8_available": "pytorch/quantization.py",
    "Linear": "pytorch/module/linear.py",
    "FusedAdam": "pytorch/optimizers/fused_adam.py",
}
#: Tensors, and the files that say what they are made of.
STORAGES = {
    "Float8Tensor": "pytorch/tensor/storage/float8_tensor_storage.py",
    "Float8BlockwiseQTensor": "pytorch/tensor/storage/float8_blockwise_tensor_storage.py",
    "MXFP8Tensor": "pytorch/tensor/storage/mxfp8_tensor_storage.py",
}
#: What layers read and set on a parameter with a fused weight gradient.
PROTOCOL = (
    "__fsdp_param__",
    "get_main_grad",
    "main_grad",
    "overwrite_main_grad",
    "grad_added_to_main_grad",
    "zero_out_wgrad",
)


@pytest.fixture(scope="module")
def sources() -> Path:
    found = files_of_transformer_engine()
    assert found is not None
    return found


def defaults_in(source: str, name: str) -> dict[str, Any]:
    """Parameters of a function, or of a class's constructor, and the text of their defaults."""
    node: Any = next(n for n in ast.parse(source).body if getattr(n, "name", None) == name)
    if isinstance(node, ast.ClassDef):
        node = next(n for n in node.body if getattr(n, "name", None) == "__init__")
    given = node.args
    names = [argument.arg for argument in (*given.args, *given.kwonlyargs)]
    texts = [None if d is None else ast.unparse(d) for d in (*given.defaults, *given.kw_defaults)]
    missing = [None] * (len(names) - len(texts))
    return dict(zip(names, [*missing, *texts], strict=True))


@pytest.mark.parametrize("name", WHERE)
def test_signatures_are_those_of_the_installed_package(sources: Path, name: str) -> None:
    """All of a function's; of a layer's constructor those that the stand-in knows."""
    theirs = defaults_in((sources / WHERE[name]).read_text(), name)
    own = fused_adam if name == "FusedAdam" else transformer_engine
    ours = defaults_in(inspect.getsource(own), name)
    if name == "Linear":
        theirs = {key: value for key, value in theirs.items() if key in ours}
    assert ours == theirs


@pytest.mark.parametrize("kind", STORAGES)
def test_tensors_are_made_of_what_the_installed_ones_are(sources: Path, kind: str) -> None:
    text = (sources / STORAGES[kind]).read_text()
    storage: Any = next(
        n for n in ast.parse(text).body if getattr(n, "name", None) == f"{kind}Storage"
    )
    theirs = {n.target.id for n in storage.body if isinstance(n, ast.AnnAssign)}
    ours = set(getattr(quantised_tensors, kind).__annotations__)
    assert ours <= theirs
    assert {attribute for attribute, _ in GATHERED[kind]} <= theirs


@pytest.mark.parametrize("name", PROTOCOL)
def test_installed_layers_know_the_protocol_of_fused_gradients(sources: Path, name: str) -> None:
    assert f'"{name}"' in (sources / "pytorch/module/linear.py").read_text() or (
        f".{name}" in (sources / "pytorch/module/linear.py").read_text()
    )


def test_the_stand_in_is_of_the_installed_release(sources: Path) -> None:
    """A newer one may have changed what a signature does not show: read its notes, then say so."""
    (installed,) = metadata.distributions(name="transformer_engine", path=[str(sources.parent)])
    assert installed.version == transformer_engine.VERSION
