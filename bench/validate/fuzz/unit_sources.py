"""Source text of the units that a program's model may have. All map [rows, WIDTH] to the same."""

from __future__ import annotations

BASE = '''
class Unit(nn.Module):
    """A unit with a branch that may be left out."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, branched=True):
        y = x + self.body(x)
        return y + self.branch(x).tanh() if branched else y
'''

FAILING = '''
class DeliberateError(Exception):
    """Raised by a unit because the program says so."""


def fail(_gradient):
    raise DeliberateError


class Unit(nn.Module):
    """A unit with a branch that may be left out, and exceptions on demand."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.fails = ""

    def forward(self, x, branched=True):
        recomputing = torch._C._current_graph_task_id() != -1
        if self.fails == ("recompute" if recomputing else "forward"):
            raise DeliberateError
        y = x + self.body(x)
        if self.fails == "backward" and y.requires_grad:
            y.register_hook(fail)
        return y + self.branch(x).tanh() if branched else y
'''

SOURCES = {
    "Block": '''
class Block(Unit):
    """A two-layer perceptron behind a norm."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def body(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))
''',
    "Conv": '''
class Conv(Unit):
    """A convolution whose weight is read without calling its module, as fused kernels do."""

    reads_child_weights = True

    def __init__(self, hidden):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        rows = x.unsqueeze(0).transpose(1, 2)
        y = F.conv1d(rows, self.conv.weight, self.conv.bias, padding=1, groups=WIDTH)
        return self.mix(y.transpose(1, 2).squeeze(0)).tanh()
''',
    "Gain": '''
class Gain(Unit):
    """Parameters that no ranks can share evenly: a scalar and a single row."""

    def __init__(self, hidden):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.full((1, WIDTH), 0.1))

    def body(self, x):
        return (x * self.gain + self.shift).tanh()
''',
    "Rows": '''
class Rows(Unit):
    """Rows of three lengths in one unit."""

    def __init__(self, hidden):
        super().__init__()
        self.wide = nn.Linear(13, hidden)
        self.back = nn.Linear(hidden, WIDTH)

    def body(self, x):
        return self.back(self.wide(F.pad(x, (0, 13 - WIDTH), value=0.5)).tanh())
''',
    "Adapter": '''
class Adapter(Unit):
    """A trained layer behind one that is often frozen, and still passes gradients on."""

    def __init__(self, hidden):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.added = nn.Linear(WIDTH, WIDTH, bias=False)

    def body(self, x):
        return self.added(self.base(x).tanh())
''',
    "Table": '''
class Table(Unit):
    """Parameters of a module that nobody calls."""

    def __init__(self, hidden):
        super().__init__()
        self.rows = nn.ParameterList([torch.full((hidden, WIDTH), 0.2), torch.full((WIDTH,), 0.1)])

    def body(self, x):
        return (x @ self.rows[0].T @ self.rows[0] + self.rows[1]).tanh()
''',
    "Outer": '''
class Outer(Unit):
    """A unit around a unit."""

    def __init__(self, hidden):
        super().__init__()
        self.inner = Block(hidden)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.3))

    def body(self, x):
        return self.inner(x) * self.scale
''',
}
#: The parameter of a kind that "part" freezes.
FIRST = {
    "Block": "up.weight",
    "Conv": "conv.weight",
    "Gain": "shift",
    "Rows": "wide.weight",
    "Adapter": "base.weight",
    "Table": "rows[1]",
    "Outer": "inner.up.weight",
}
#: Other kinds that a kind is made of.
NEEDS = {"Outer": ("Block",)}
