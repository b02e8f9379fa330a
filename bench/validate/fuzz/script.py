"""A program as the source of a script, which is also what the fuzzer's own ranks execute."""

from __future__ import annotations

import re
from string import Template
from textwrap import indent

from bench.validate.fuzz import engine_sources, unit_sources
from bench.validate.fuzz.program import META, Cycle, Pass, Program
from bench.validate.fuzz.trial_source import BUILD, BUILD_ON_META, METHODS, START

_HEAD = '''"""$TITLE

    torchrun --nproc-per-node $RANKS FILE
"""

import contextlib
import copy
import dataclasses
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
'''
_CONSTANTS = """
WIDTH = 5
DTYPE = torch.$DTYPE
TOLERANCE = $TOLERANCE
DIVISOR = $DIVISOR
UNUSED_ARE_ZERO = $UNUSED
"""
_END = """
if __name__ == "__main__":
    # Memory that nobody has written is NaN, so that whoever reads it shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: as in plain torch")
    dist.destroy_process_group()
"""
_TOLERANCES = {"float64": 1e-10, "float32": 2e-5}
_SHARDINGS = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
_FUNCTION = re.compile(r"def (\w+)")
_IMPORT = re.compile(r"(?:from \S+ )?import (?:torch\.nn\.functional as )?([\w, ]+)$")


def script(program: Program, title: str = "A training program beside plain torch.") -> str:
    """Source of `program`: its `main` raises where the engine differs from plain torch.

    Needs a process group of `program.ranks` ranks, which it makes itself when it is run.
    """
    options = dict(program.options)
    words = {
        "TITLE": title.replace("\\", "/").replace('"""', "'''"),
        "RANKS": str(program.ranks),
        "DTYPE": program.dtype,
        "TOLERANCE": "0.0" if program.exact else str(_TOLERANCES[program.dtype]),
        "BUILD": (BUILD_ON_META if META in options else BUILD).strip(),
        "DIVISOR": "1" if options.get("calculate_per_token_loss") else str(program.ranks),
        "UNUSED": str(_hands_out_zeros(options)),
        **_engine_words(program, options),
    }
    main = _main(program)
    called = {name for name in METHODS if f"trial.{name}(" in main}
    trial = START + "".join(METHODS[name] for name in METHODS if name in called)
    engine = engine_sources.SOURCES.get(program.engine, engine_sources.OUTSIDE)
    parts = [_HEAD, engine, _CONSTANTS, *_unit_classes(program), _model(program), trial, main, _END]
    text = "\n\n\n".join(part.strip("\n") for part in parts) + "\n"
    filled = Template(text).substitute(words)
    return _without_unused(
        "\n".join(line for line in filled.splitlines() if line.strip() or not line)
    )


def _hands_out_zeros(options: dict[str, object]) -> bool:
    """Whether what nobody used is to have a gradient of zeros."""
    reduced = bool(options.get("reduce_scatter_unused_params"))
    return reduced or options.get("unused_parameters") == "zero"


def _without_unused(text: str) -> str:
    """Without functions and imports that nothing names."""
    blocks = text.split("\n\n\n")
    kept = [
        block
        for block in blocks
        if (found := _FUNCTION.match(block)) is None
        or len(re.findall(rf"\b{found[1]}\(", text)) > 1
        or found[1] in ("main", "gradient", "weight", "fail")
    ]
    lines = "\n\n\n".join(kept).splitlines()
    body = "\n".join(line for line in lines if not _IMPORT.match(line))
    return (
        "\n".join(
            line
            for line in lines
            if not (found := _IMPORT.match(line))
            or any(re.search(rf"\b{name}\b", body) for name in found[1].split(", "))
        )
        + "\n"
    )


def _engine_words(program: Program, options: dict[str, object]) -> dict[str, str]:
    words = {
        "ENGINE": program.engine,
        "STRATEGY": str(program.strategy),
        "CLASSES": "".join(f"{kind}, " for kind in _kinds(program)).strip(),
        **_mesh_words(program),
    }
    if program.engine == "mfsdp":
        auto = options.setdefault("sync_model_each_microbatch", False)
        words["ACCUMULATING"] = (
            "contextlib.nullcontext() if last else model.no_sync()"
            if auto
            else "model.sync() if last else model.no_sync()"
        )
        # Nothing of torch steps with decoupled gradients.
        decoupled = options.get("use_decoupled_grad")
        own = "sgd(model.parameters())"
        words["OPTIMIZER"] = own if decoupled else f"fully_shard_optimizer({own})"
        words["GRAD"] = "decoupled_grad" if options.get("use_decoupled_grad") else "grad"
        words["OPTIONS"] = f"\n{' ' * 8}".join(f"{k}={v!r}," for k, v in options.items())
    elif program.engine == "fsdp1":
        words["SHARDING"] = _SHARDINGS[program.strategy]
    elif program.engine == "fsdp2":
        unused = options.get("reduce_scatter_unused_params")
        words["OPTIONS"] = "model.set_reduce_scatter_unused_params(True)" if unused else ""
        words["RESHARD"] = str(options.get("reshard_after_forward", program.strategy == 3))  # noqa: PLR2004
        words["ACCUMULATING"] = (
            "" if options.get("sync_every_pass") else "model.set_requires_gradient_sync(last)"
        )
    else:
        words["OPTIONS"] = ", ".join(f"{k}={v!r}" for k, v in options.items())
    return words


def _mesh_words(program: Program) -> dict[str, str]:
    if program.mode == "flat":
        return {"MESH": f'mesh = init_device_mesh("cpu", ({program.ranks},))', "AXES": ""}
    shape = (2, program.ranks // 2)
    axes = (
        'dp_shard_dim="inner", dp_outer_dim="outer", hybrid_fsdp_group=dist.group.WORLD,\n'
        f"        outer_dp_sharding_strategy={int(program.mode == 'hfsdp')},"
    )
    mesh = f'mesh = init_device_mesh("cpu", {shape}, mesh_dim_names=("outer", "inner"))'
    return {"MESH": mesh, "AXES": axes}


def _kinds(program: Program) -> list[str]:
    used = {unit.kind for unit in program.units}
    used |= {needed for kind in used for needed in unit_sources.NEEDS.get(kind, ())}
    return [kind for kind in unit_sources.SOURCES if kind in used]


def _unit_classes(program: Program) -> list[str]:
    fails = any(one.kind == "failing" for cycle in program.cycles for one in cycle.passes)
    base = unit_sources.FAILING if fails else unit_sources.BASE
    return [base.lstrip(), *(unit_sources.SOURCES[kind] for kind in _kinds(program))]


def _model(program: Program) -> str:
    units = program.units
    made = ", ".join(f"{unit.kind}({unit.hidden})" for unit in units)
    lines = [f"self.units = nn.ModuleList([{made}])"]
    if program.root == "tied":
        lines.append("self.last.weight = self.first.weight")
    for index, unit in enumerate(units):
        owner = {"root": "self.first", "unit": "self.units[0].branch"}.get(unit.tie)
        if owner and not (unit.tie == "unit" and index == 0):
            lines.append(f"self.units[{index}].branch.weight = {owner}.weight")
    if program.root == "frozen":
        lines.append("self.first.requires_grad_(False)")
    for index, unit in enumerate(units):
        if unit.frozen:
            part = f".{unit_sources.FIRST[unit.kind]}" if unit.frozen == "part" else ""
            lines.append(f"self.units[{index}]{part}.requires_grad_(False)")
    used = {letter for c in program.cycles for p in c.passes for path in p.paths for letter in path}
    return _MODEL_HEAD + indent("\n".join(lines), " " * 8) + _forward(used, program.loss_scale)


_MODEL_HEAD = '''
class Model(nn.Module):
    """Layers of the root around units, which do what `path` says: a letter each."""

    unit_classes = ($CLASSES)

    def __init__(self):
        super().__init__()
        self.path = ""
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
'''


def _forward(used: set[str], loss_scale: float) -> str:
    several = "".join(sorted(used & set("tCK")))
    twice = [f'        for _ in range(2 if letter in "{several}" else 1):'] if several else []
    indented = "    " if twice else ""
    recomputed = "".join(sorted(used & set("ckCK")))
    lines = [
        "",
        "",
        "def forward(self, x, target):",
        "    x = self.first(x)",
        "    for unit, letter in zip(self.units, self.path, strict=True):",
        *twice,
        f"{indented}        x = self.step(unit, letter, x)",
        "    return F.mse_loss(self.last(x), target)"
        + (f" * {loss_scale}" if loss_scale != 1 else ""),
        "",
        "def step(self, unit, letter, x):",
    ]
    if "s" in used:
        lines += ['    if letter == "s":', "        return x"]
    if recomputed:
        lines += [
            f'    if letter in "{recomputed}" and torch.is_grad_enabled():',
            '        return checkpoint(unit, x, True, use_reentrant=letter in "kK")',
        ]
    branch = 'letter != "p"' if "p" in used else "True"
    if "d" in used:
        lines += [f"    y = unit(x, {branch})", '    return x if letter == "d" else y']
    else:
        lines += [f"    return unit(x, {branch})"]
    return indent("\n".join(lines), " " * 4)


def _main(program: Program) -> str:
    lines = ["def main():", "    trial = Trial()"]
    ahead = False
    for cycle in (*program.cycles, *_closing(program)):
        # What was gathered ahead is there until a pass has used it.
        ahead = cycle.ahead or (ahead and all(one.kind == "failing" for one in cycle.passes))
        lines += [f"    {line}" for line in _cycle(cycle)]
        lines.append(f"    trial.{'forget' if ahead else 'end_cycle'}()")
    return "\n".join(lines)


def _closing(program: Program) -> tuple[Cycle, ...]:
    """Two plain cycles, with which every program ends: what went before may show in them alone."""
    plain = Pass("micro", ("r" * len(program.units),))
    optimizes = all(cycle.optimizes for cycle in program.cycles)
    return (Cycle((plain,), optimizes=optimizes),) * 2


def _cycle(cycle: Cycle) -> list[str]:
    lines = ["trial.resume()"] if cycle.resumes else []
    lines += ["trial.load()"] if cycle.loads else []
    if cycle.wire:
        lines.append(f"trial.send_gradients_in(torch.{cycle.wire})")
    synced = cycle.end == "sync"
    for index, one in enumerate(cycle.passes):
        # Its backward pass would come after the cycle's last one.
        if not (synced and one.kind == "failing" and -1 < cycle.last < index):
            lines.append(_pass(one, last=synced and index == cycle.last))
    lines.append(f'trial.finish("{cycle.end}")')
    if cycle.scale != 1.0:
        lines.append(f"trial.scale({cycle.scale})")
    if cycle.clip:
        lines.append(f"trial.clip({cycle.clip})")
    if cycle.ahead:
        lines.append("trial.gather_ahead()")
    if cycle.optimizes:
        lines.append("trial.step()")
    return lines


def _pass(one: Pass, *, last: bool) -> str:
    arguments = [f'"{path}"' for path in one.paths]
    if one.kind == "failing":
        arguments += [f'phase="{one.fails[0]}"', f"unit={one.fails[1]}"]
    if last:
        arguments.append("last=True")
    return f"trial.{one.kind}({', '.join(arguments)})"
