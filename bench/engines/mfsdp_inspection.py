"""`Inspection` of the engine `mfsdp`, through the public surface of the core."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import mfsdp_core
from bench.engines.dtypes import TORCH_DTYPES, local_tensor
from bench.engines.inspection import BucketContents, StockInspection, WireEntry
from bench.spec import DtypeName

_PREFIX = "module."
#: Small enough for several files.
_FILE_BYTES = 500


class MfsdpInspection(StockInspection):
    """Of a `MegatronFSDP`, whose parameters are DTensors of the main weights."""

    _model: Any

    def __init__(self, model: Any) -> None:
        super().__init__(model, prefix=_PREFIX, autocast=False)

    def whole_weights(self) -> dict[str, Tensor]:
        """`gather_full` of every parameter."""
        return {name: mfsdp_core.gather_full(p.detach()) for name, p in self._parameters().items()}

    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """`load_state_dict`, strict."""
        self._model.load_state_dict({_PREFIX + name: value for name, value in weights.items()})

    def equalise_weights(self) -> None:
        """`broadcast_params`."""
        self._model.broadcast_params()

    def wire(self) -> list[WireEntry]:
        """The core's wire log."""
        return [
            WireEntry(r.operation, r.dtype, r.payload_bytes, r.group, r.group_size, r.bucket)
            for r in self._model.wire_log
        ]

    def buckets(self) -> list[BucketContents]:
        """As planned from the shapes."""
        return [
            BucketContents(bucket.name, bucket.parameters, bucket.elements)
            for bucket in self._model.buckets()
        ]

    def held_bytes(self) -> dict[str, int]:
        """The core's ledger, and that of host memory."""
        ledger = self._model.ledger
        held = Counter(ledger.bytes_by_category())
        held.update(ledger.host.bytes_by_category())
        return dict(held)

    def gather_ahead(self) -> None:
        """`start_param_sync`."""
        self._model.start_param_sync()

    def finish_gradients(self) -> None:
        """`finish_grad_sync`."""
        self._model.finish_grad_sync()

    def follow(self, write: Callable[[str], None]) -> None:
        """The core's events."""
        self._model.events.subscribe(
            lambda event: write(
                f"{event.kind} {event.operation} of {event.bucket}, {event.payload_bytes} B, "
                f"{event.group}"
            )
        )

    def exports(self, folder: Path, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
        """Exports, uneven DTensors of a copy, files that were read into other weights; two losses.

        A rank that gets nothing from an export has an empty dict.
        """
        model, copied = self._model, copy.deepcopy(self._model.module)
        exported: dict[str, Any] = {"export_state_dict": mfsdp_core.export_state_dict(model)}
        full_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        exported["full_state_dict"] = {
            n.removeprefix(_PREFIX): value for n, value in full_state.items()
        }
        state = mfsdp_core.uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(
            {name: parameter.detach() for name, parameter in copied.named_parameters()}
        )
        full = mfsdp_core.uneven_dtensor.uneven_dtensor_to_full_tensor
        exported["copy"] = {name: full(value) for name, value in state.items()}
        exported["split_dtensor"] = {
            name: torch.cat(
                [full(part) for part in mfsdp_core.uneven_dtensor.split_dtensor(value, 2)]
            )
            for name, value in state.items()
        }
        exported["loss"] = {"model": self.evaluate(tokens, targets)}
        mfsdp_core.save_safetensors(folder, model, max_file_bytes=_FILE_BYTES)
        for parameter in model.parameters():
            local_tensor(parameter.data).fill_(7.0)
        mfsdp_core.load_safetensors(folder, model)
        exported["loss"]["files"] = self.evaluate(tokens, targets)
        exported["files"] = self.whole_weights()
        return exported

    def set_wire_dtype(self, dtype: DtypeName) -> None:
        """`reset_mixed_precision_policy`."""
        changed = dataclasses.replace(self._model.mp_policy, grad_comm_dtype=TORCH_DTYPES[dtype])
        self._model.reset_mixed_precision_policy(changed)
