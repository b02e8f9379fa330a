"""Bugs that are on no list: changes of the core that the validator has to notice all the same."""

from __future__ import annotations

from bench.validate.bugs import Change

_GRADIENTS = "runtime/gradient_buffers.py"
_PIPELINE = "runtime/grad_pipeline.py"
_WEIGHTS = "runtime/weight_buffers.py"

UNLISTED: dict[str, tuple[Change, ...]] = {
    "hybrid sharding divides by the inner ranks alone": (
        Change(
            "runtime/build.py",
            "environment.dense.coordinate().data_parallel_size",
            "environment.dense.coordinate().inner_size",
        ),
    ),
    "the last microbatch is not reduced": (
        Change(
            _PIPELINE,
            "if not buffers.holds_whole or (",
            "if not (buffers.holds_whole or is_last) or (",
        ),
    ),
    "ranks own each other's rows": (
        Change(
            "plan/coordinate.py",
            "        return self.inner_rank\n",
            "        return self.inner_size - 1 - self.inner_rank\n",
        ),
    ),
    "one rank refreshes no weights": (
        Change(
            _WEIGHTS,
            '            self._enter("invalidate")',
            '            self._enter("invalidate") if self._gather.rank else None',
        ),
    ),
    "gradients travel in the dtype of the accumulator": (
        Change(
            _GRADIENTS,
            "self._layout.total_elements, self._dtypes.grad_comm)",
            "self._layout.total_elements, self._dtypes.main_grads)",
        ),
    ),
    "a bucket is never given back": (
        Change(_GRADIENTS, "self._allocator.release(pending.key)", "pending.key.size_bytes"),
    ),
    "weights are not installed after a step": (
        Change("state/optimizer.py", "owner.install_optimized_model_weights()", "owner.ledger"),
    ),
    "the outer stage runs on every microbatch": (
        Change(_PIPELINE, "if is_last and buffers.awaits_outer:", "if buffers.awaits_outer:"),
    ),
    "the outer stage adds up where it has to average": (
        Change("runtime/outer_reduction.py", "self._average = average", "self._average = False"),
    ),
    "replicas on the outer axis are not made equal": (
        Change(
            _WEIGHTS,
            "if self._outer is not None and not strategy.outer.shards_optimizer:",
            "if self._outer is None and not strategy.outer.shards_optimizer:",
        ),
    ),
    "a sparse gradient is not made dense": (
        Change(_GRADIENTS, "if gradient.is_sparse:", "if not gradient.layout:"),
    ),
    "the norm is that of a rank's own rows": (
        Change(
            "state/grad_norm.py", "if not isinstance(placement, Replicate):", "if not placement:"
        ),
    ),
    "what no backward pass filled is sent as it is": (
        Change(
            _GRADIENTS,
            "            if index not in self._filled:\n                buffer",
            ("            if index < 0:\n                buffer"),
        ),
    ),
    "a step adds to the gradient of the step before": (
        Change(
            _GRADIENTS,
            "        self._scaled.clear()\n        self._landed = False\n",
            "        self._scaled.clear()\n",
        ),
    ),
    "outer sub-shards are not gathered after a step": (
        Change(
            _WEIGHTS,
            "self._outer_stale = strategy.outer.weight_refresh is Collective.ALL_GATHER",
            "self._outer_stale = False",
        ),
    ),
    "averaging collectives add up": (
        Change(
            "comm/torch_backend.py",
            "return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM",
            "return dist.ReduceOp.SUM",
        ),
    ),
    "the group for gathers is not used": (
        Change(
            "comm/data_parallel.py",
            'gather = over(self.gather_group, "inner", strategy.inner)',
            "gather = inner",
        ),
    ),
    "a tied weight's gradient counts once per name": (
        Change(
            _PIPELINE,
            "buffers.accumulate(index, gradient, ",
            "buffers.accumulate(index, gradient * len(unit.groups[0].parameters[index].names), ",
        ),
    ),
}
