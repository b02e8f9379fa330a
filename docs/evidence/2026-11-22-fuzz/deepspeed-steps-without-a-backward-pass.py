"""deepspeed raised: KeyError: 0

    torchrun --nproc-per-node 2 FILE
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


from bench.validate.fuzz.outside import accumulating, clip, finish, forget, gradient
from bench.validate.fuzz.outside import held, load, sgd, sharded, sharded_by, train, weight


def shard(module):
    return sharded_by("deepspeed", module, strategy=1)


WIDTH = 5
DTYPE = torch.float32
TOLERANCE = 2e-05
DIVISOR = 2
UNUSED_ARE_ZERO = False


class Unit(nn.Module):
    """A unit with a branch that may be left out."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, branched=True):
        y = x + self.body(x)
        return y + self.branch(x).tanh() if branched else y


class Block(Unit):
    """A two-layer perceptron behind a norm."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def body(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers of the root around units, which do what `path` says: a letter each."""

    unit_classes = (Block,)

    def __init__(self):
        super().__init__()
        self.path = ""
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList([Block(3)])

    def forward(self, x, target):
        x = self.first(x)
        for unit, letter in zip(self.units, self.path, strict=True):
            x = self.step(unit, letter, x)
        return F.mse_loss(self.last(x), target)

    def step(self, unit, letter, x):
        return unit(x, True)


class Trial:
    """A sharded model beside plain torch, which sees the data of all ranks."""

    def __init__(self):
        torch.manual_seed(4)
        self.expected = Model().to(DTYPE)
        self.module = copy.deepcopy(self.expected)
        self.model, self.optimizer = shard(self.module)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.reference = sgd(self.expected.parameters())
        self.passes, self.backwards, self.cycle = 0, 0, 1
        self.tolerance = TOLERANCE
        self.at_rest = held(self.model)

    def batch(self, rank):
        """Inputs and targets."""
        generator = torch.Generator().manual_seed(1000 * self.passes + rank)
        return torch.randn(2, 2, WIDTH, generator=generator, dtype=torch.float64).to(DTYPE)

    def choose(self, paths):
        """The next pass takes these paths, by rank; returns this rank's inputs and targets."""
        self.passes += 1
        self.module.path = paths[self.rank % len(paths)]
        return self.batch(self.rank)

    def plain(self, paths, times=1):
        """The pass in plain torch, for all ranks; returns this rank's loss."""
        own = None
        for rank in range(self.ranks):
            self.expected.path = paths[rank % len(paths)]
            loss = self.expected(*self.batch(rank))
            if times:
                (loss * times / DIVISOR).backward()
            own = loss.detach() if rank == self.rank else own
        return own

    def close(self, what, found, wanted, size=None):
        size = float(wanted.abs().max()) if size is None else size
        found = found.reshape(()) if not wanted.shape and found.numel() == 1 else found
        error = float((found.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
        assert found.shape == wanted.shape and error <= self.tolerance * (size + 1e-3), (
            f"cycle {self.cycle}, pass {self.passes}: {what} is off by {error:.3g} of {size:.3g}"
        )

    def finish(self, end):
        """Complete the gradients, and compare them."""
        finish(self.model, end)
        plain = dict(self.expected.named_parameters())
        for parameter in plain.values() if UNUSED_ARE_ZERO and self.backwards else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        size = max([float(p.grad.abs().max()) for p in plain.values() if p.grad is not None] or [0])
        self.compare("gradient", {n: p.grad for n, p in plain.items()}, gradient, size)

    def compare(self, what, wanted, look, size=None):
        for name, parameter in sharded(self.model).items():
            found, right = look(parameter), wanted[name]
            assert (found is None) == (right is None), (
                f"cycle {self.cycle}: {what} of {name} is {'None' if found is None else 'not None'}"
                f", in plain torch it is {'None' if right is None else 'not None'}"
            )
            if found is not None:
                self.close(f"{what} of {name}", found, right, size)
                if self.tolerance > TOLERANCE:
                    right.copy_(found.reshape(right.shape))  # rounding on the wire, judged once

    def forget(self):
        """The end of a cycle."""
        forget(self.model, self.optimizer)
        self.expected.zero_grad()
        self.backwards = 0

    def end_cycle(self):
        self.forget()
        now = held(self.model)
        more = {name: count - self.at_rest[name] for name, count in now.items()}
        more = {name: count for name, count in more.items() if count}
        assert not more, f"cycle {self.cycle}: held at rest, beyond the first bytes: {more}"
        self.cycle += 1

    def micro(self, *paths, last=False):
        """Forward and backward."""
        loss = train(self.model, self.choose(paths), last)
        self.backwards += 1
        self.close("loss", loss.detach(), self.plain(paths))

    def evaluate(self, *paths):
        """No autograd."""
        batch = self.choose(paths)
        self.model.eval()
        with torch.no_grad():
            found, wanted = self.model(*batch), self.plain(paths, times=0)
        self.model.train()
        self.close("loss of an evaluation", found, wanted)

    def step(self):
        self.optimizer.step()
        self.reference.step()
        wanted = {n: p.detach() for n, p in self.expected.named_parameters()}
        self.compare("weight after the step", wanted, weight)


def main():
    trial = Trial()
    trial.evaluate("r")
    trial.finish("sync")
    trial.step()
    trial.end_cycle()
    trial.evaluate("r")
    trial.finish("sync")
    trial.step()
    trial.end_cycle()
    trial.micro("r", last=True)
    trial.finish("sync")
    trial.step()
    trial.end_cycle()
    trial.micro("r", last=True)
    trial.finish("sync")
    trial.step()
    trial.end_cycle()


if __name__ == "__main__":
    # Memory that nobody has written is NaN, so that whoever reads it shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: as in plain torch")
    dist.destroy_process_group()
