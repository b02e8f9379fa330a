"""Cases side by side: several sets of ranks, and what came of each case in the order of the cases.

A case waits more than it computes, so that two sets keep two cores busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from bench.testing.workers import Workers

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    sets: Sequence[Workers], items: Iterable[Item], body: Callable[[Workers, Item], Result]
) -> Generator[tuple[Item, Result], None, None]:
    """`body` for every item on one of the sets of ranks; results in the order of the items.

    With one set an item is begun when the next result is asked for. With more, closing the
    iterator kills the ranks that work ahead.
    """
    if len(sets) == 1:
        for item in items:
            yield item, body(sets[0], item)
        return
    free: SimpleQueue[Workers] = SimpleQueue()
    for workers in sets:
        free.put(workers)

    def run(item: Item) -> Result:
        workers = free.get()
        try:
            return body(workers, item)
        finally:
            free.put(workers)

    begun: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(len(sets)) as pool:
        try:
            for item in items:
                begun.append((item, pool.submit(run, item)))
                if len(begun) > len(sets):
                    yield begun[0][0], begun.popleft()[1].result()
            while begun:
                yield begun[0][0], begun.popleft()[1].result()
        finally:
            if begun:
                pool.shutdown(wait=False, cancel_futures=True)
                for workers in sets:
                    workers.kill()
