"""What must come out, from plain torch in one process and none of the code under test.

For N data-parallel ranks and k microbatches, g[r, j] is the gradient of rank r on microbatch j, at
the weights that the engine had before the step: every step is judged by itself. The gradient handed
to the optimizer is (1/N) * sum of all g[r, j], added up in FP64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.engines.dtypes import TORCH_DTYPES
from bench.testing.quantised import quantised, reads_two
from bench.testing.reference import Named, gradient, mean
from bench.validate.cases import POLICIES, Case
from bench.validate.toy_models import build_toy_model, microbatch
from bench.validate.weight_spy import WeightSpy


@dataclass(frozen=True)
class RawStep:
    """Gradients and losses by [rank][microbatch]; names of the weights that each rank reads.

    used: names of the parameters that a backward pass of any rank has reached.
    """

    gradients: list[list[Named]]
    losses: list[list[float]]
    read: list[frozenset[str]]
    used: frozenset[str]

    def contributions(self, name: str) -> list[list[Tensor]]:
        """Of one parameter, by [rank][microbatch], as autograd left them."""
        return [[of_microbatch[name] for of_microbatch in row] for row in self.gradients]

    def mean(self, name: str) -> Tensor:
        """The oracle's gradient, FP64."""
        return mean(self.contributions(name))


class Reference:
    """Plain training of a case's model. autocast: compute so, instead of casting the weights."""

    def __init__(self, case: Case, device: torch.device, *, autocast: bool) -> None:
        compute, main, _, _ = (TORCH_DTYPES[name] for name in POLICIES[case.policy])
        self.case = case
        self.compute = compute
        self.main = main
        self._device = device
        self._autocasts = autocast and compute != main
        dtype = main if self._autocasts else compute
        self._model = build_toy_model(case.model, torch.float64, device).to(dtype)
        self._spy = WeightSpy(self._model)
        self.trainable = [n for n, p in self._model.named_parameters() if p.requires_grad]
        self.shapes = {n: tuple(p.shape) for n, p in self._model.named_parameters()}

    def initial(self, seed: int = 7) -> Named:
        """Weights that an engine starts from, in the main dtype (frozen ones: as they compute)."""
        start = torch.float64 if self.case.policy == "fp64" else torch.float32
        model = build_toy_model(self.case.model, start, self._device, seed)
        return {
            name: p.detach().to(self.main if p.requires_grad else self.compute).cpu()
            for name, p in model.named_parameters()
        }

    def as_computed(
        self,
        weights: Mapping[str, Tensor],
        earlier: Sequence[Mapping[str, Tensor]] = (),
        *,
        backward: bool = False,
    ) -> Named:
        """What modules must read, given the main weights, now and at earlier encodings."""
        dtype = self.main if self._autocasts else self.compute
        recipe = self.case.recipe
        return {
            name: quantised(
                recipe, value, dtype, [e[name] for e in earlier if name in e], backward=backward
            )
            for name, value in weights.items()
        }

    def step(
        self,
        weights: Mapping[str, Tensor],
        step: int,
        microbatches: int,
        earlier: Sequence[Mapping[str, Tensor]] = (),
    ) -> RawStep:
        """Every g[r, j] of a step at `weights`. A parameter without a gradient has zeros."""
        self._forward = self.as_computed(weights, earlier)
        self._backward = self.as_computed(weights, earlier, backward=True)
        read: list[frozenset[str]] = []
        gradients: list[list[Named]] = []
        losses: list[list[float]] = []
        used: set[str] = set()
        for rank in range(self.case.data_ranks):
            self._spy.begin(0)
            made = [self._microbatch(rank, index, step) for index in range(microbatches)]
            gradients.append([gradient for gradient, _, _ in made])
            losses.append([loss for _, loss, _ in made])
            used.update(*(reached for _, _, reached in made))
            read.append(frozenset(self._spy.seen))
        return RawStep(gradients, losses, read, frozenset(used))

    def _microbatch(self, rank: int, index: int, step: int) -> tuple[Named, float, set[str]]:
        batch = microbatch(rank, index, step, self._device)
        tokens = batch[1].numel() if self.case.per_token else 1

        def loss() -> Tensor:
            self._set(self._forward)
            with self._computing():
                value: Tensor = self._model(*batch)
            if reads_two(self.case.recipe):
                self._set(self._backward)
            return value * tokens

        gradients, value = gradient(self._model, loss)
        reached = {n for n, p in self._model.named_parameters() if p.grad is not None}
        return gradients, float(value) / tokens, reached

    def _set(self, weights: Named) -> None:
        """Without autograd's notice: what it has saved of the weights changes as well."""
        for name, parameter in self._model.named_parameters():
            parameter.data.copy_(weights[name])

    def _computing(self) -> AbstractContextManager[object]:
        if not self._autocasts:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.compute)


class ReferenceOptimizer:
    """Torch's optimizers on whole weights, fed with the gradients that the engine handed over.

    AdamW; for muon torch's Muon steps the matrices of units.
    """

    def __init__(self, case: Case, weights: Mapping[str, Tensor], trainable: list[str]) -> None:
        train = case.resolved("cpu").train
        self._parameters = {name: nn.Parameter(weights[name].clone()) for name in trainable}
        matrices = _unit_matrices(case) if case.optimizer == "muon" else frozenset()
        shared: dict[str, Any] = {"lr": train.lr, "weight_decay": train.weight_decay}
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [p for name, p in self._parameters.items() if name not in matrices],
                betas=(train.beta1, train.beta2),
                eps=train.eps,
                **shared,
            )
        ]
        if matrices:
            own = [p for name, p in self._parameters.items() if name in matrices]
            self._optimizers += [torch.optim.Muon(own, adjust_lr_fn="match_rms_adamw", **shared)]

    def step(self, gradients: Mapping[str, Tensor | None], weights: Mapping[str, Tensor]) -> Named:
        """Weights after a step from `weights`; a parameter whose gradient is None stays."""
        for name, parameter in self._parameters.items():
            gradient = gradients.get(name)
            parameter.data.copy_(weights[name])
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        for optimizer in self._optimizers:
            optimizer.step()
        return {name: p.detach().clone() for name, p in self._parameters.items()}


def _unit_matrices(case: Case) -> frozenset[str]:
    """Names of the 2-D weights in units of a case's model."""
    model: Any = build_toy_model(case.model, torch.float64, torch.device("cpu"))
    units = [module for module in model.modules() if isinstance(module, model.unit_classes)]
    inside = {id(p) for unit in units for p in unit.parameters() if p.dim() > 1}
    return frozenset(name for name, p in model.named_parameters() if id(p) in inside)


def norm_of(case: Case, gradients: Mapping[str, Tensor | None]) -> float:
    """Global 2-norm, in FP64. Parts and experts that other ranks hold are equal to ours."""
    squares = [
        case.holders(name) * float(g.double().square().sum())
        for name, g in gradients.items()
        if g is not None
    ]
    return math.sqrt(sum(squares))


def clip_coefficient(norm: float, bound: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ has it."""
    return min(1.0, bound / (norm + 1e-6))
