"""Source text of the model beside plain torch, and of what a program may do with both."""

from __future__ import annotations

START = '''
class Trial:
    """A sharded model beside plain torch, which sees the data of all ranks."""

    def __init__(self):
        $BUILD
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
'''

#: How the two models of a trial get equal weights. On the meta device, sharding draws them again.
BUILD = """
        torch.manual_seed(4)
        self.expected = Model().to(DTYPE)
        self.module = copy.deepcopy(self.expected)
"""
BUILD_ON_META = """
        torch.set_default_dtype(DTYPE)
        torch.manual_seed(4)
        self.expected = Model()
        with torch.device("meta"):
            self.module = Model()
        torch.manual_seed(4)
"""

#: Methods that a script has if its program calls them.
METHODS = {
    "micro": '''
    def micro(self, *paths, last=False):
        """Forward and backward."""
        loss = train(self.model, self.choose(paths), last)
        self.backwards += 1
        self.close("loss", loss.detach(), self.plain(paths))
''',
    "double": '''
    def double(self, *paths, last=False):
        """Two backward passes through one graph."""
        batch = self.choose(paths)
        with accumulating(self.model, last):
            loss = self.model(*batch)
            with accumulating(self.model, False):
                loss.backward(retain_graph=True)
            with accumulating(self.model, last):
                loss.backward()
        self.backwards += 2
        self.close("loss", loss.detach(), self.plain(paths, times=2))
''',
    "pair": '''
    def pair(self, *paths, last=False):
        """Two forward passes, then the backward passes, the later one first."""
        batch = self.choose(paths)
        with accumulating(self.model, last):
            one, two = self.model(*batch), self.model(*batch)
            with accumulating(self.model, False):
                two.backward()
            with accumulating(self.model, last):
                one.backward()
        self.backwards += 2
        wanted = self.plain(paths, times=2)
        self.close("loss", one.detach(), wanted)
        self.close("loss of the second pass", two.detach(), wanted)
''',
    "evaluate": '''
    def evaluate(self, *paths):
        """No autograd."""
        batch = self.choose(paths)
        self.model.eval()
        with torch.no_grad():
            found, wanted = self.model(*batch), self.plain(paths, times=0)
        self.model.train()
        self.close("loss of an evaluation", found, wanted)
''',
    "unused": '''
    def unused(self, *paths):
        """A graph that nobody runs backward."""
        self.model(*self.choose(paths))
''',
    "failing": '''
    def failing(self, *paths, phase, unit):
        """An exception from a unit, which the training loop survives."""
        batch = self.choose(paths)
        twin = copy.deepcopy(self.expected)
        twin.path, twin.units[unit].fails = self.module.path, phase
        self.module.units[unit].fails = phase
        found = wanted = False
        try:
            twin(*batch).backward()
        except DeliberateError:
            wanted = True
        try:
            train(self.model, batch, False)
        except DeliberateError:
            found = True
        finally:
            self.module.units[unit].fails = ""
        # What is frozen neither recomputes nor has a backward pass to fail in.
        assert found == wanted, f"cycle {self.cycle}: raised: {found}, in plain torch: {wanted}"
        if phase != "forward" or not found:
            # What came before the exception stays in the accumulators.
            self.forget()
        # Autograd's queue holds the graph of a pass that raised until another one runs.
        torch.zeros((), requires_grad=True).clone().backward()
''',
    "guarded": '''
    def guarded(self, *paths):
        """A batch of NaN, which the guard refuses; the training loop drops the cycle."""
        inputs, target = self.choose(paths)
        try:
            train(self.model, (inputs * float("nan"), target), False)
            finish(self.model, "finish")
            refused = "nothing"
        except ArithmeticError as error:
            refused = type(error).__name__
        assert refused == "NonFiniteGradientError", f"cycle {self.cycle}: raised {refused}"
        self.forget()
        # Autograd's queue holds the graph of a pass that raised until another one runs.
        torch.zeros((), requires_grad=True).clone().backward()
''',
    "scale": """
    def scale(self, factor):
        self.model.scale_gradients(factor)
        for parameter in self.expected.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.compare(
            "scaled gradient", {n: p.grad for n, p in self.expected.named_parameters()}, gradient
        )
""",
    "clip": """
    def clip(self, bound):
        wanted = nn.utils.clip_grad_norm_(self.expected.parameters(), bound)
        self.close("norm", clip(self.model, bound), wanted)
""",
    "step": """
    def step(self):
        self.optimizer.step()
        self.reference.step()
        wanted = {n: p.detach() for n, p in self.expected.named_parameters()}
        self.compare("weight after the step", wanted, weight)
""",
    "load": '''
    def load(self):
        """Whole weights from outside."""
        changed = {n: p.detach() * 0.9 for n, p in self.expected.state_dict().items()}
        self.expected.load_state_dict(changed)
        load(self.model, changed)
''',
    "send_gradients_in": """
    def send_gradients_in(self, dtype):
        send_gradients_in(self.model, dtype)
        self.tolerance = max(self.tolerance, 8 * torch.finfo(dtype).eps)
""",
    "resume": '''
    def resume(self):
        """Continue from a checkpoint, with another model."""
        self.module = Model().to(DTYPE)
        self.model, self.optimizer = resume(self.model, self.optimizer, self.module)
        self.at_rest = held(self.model)
        wanted = {n: p.detach() for n, p in self.expected.named_parameters()}
        self.compare("loaded weight", wanted, weight)
''',
    "gather_ahead": '''
    def gather_ahead(self):
        """Before a step, whose weights are wanted all the same."""
        gather_ahead(self.model)
''',
}
