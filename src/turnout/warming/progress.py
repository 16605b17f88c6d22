"""A bar that shows what is planned and compiled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class Bar:
    """On a terminal, shows what is planned, then how many kernels are compiled.

    after: seconds for which nothing is shown. Left, the bar is gone.
    """

    def __init__(self, console: Console | None = None, *, after: float = 0.0):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = console or Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.shown.add_task("planning", total=None)
        self.begin = threading.Timer(after, self.shown.start)
        self.begin.daemon = True

    def __enter__(self) -> Bar:
        self.begin.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.begin.cancel()
        self.begin.join()  # it may just be starting the bar
        self.shown.stop()

    def plan(self, name: str) -> None:
        self.shown.update(self.task, description=f"planning {name}")

    def tell(self, done: int, total: int, name: str) -> None:
        """So many kernels are compiled, of so many that were missing; `name` is the last one."""
        description = f"compiled {name}" if name else "compiling"
        self.shown.update(self.task, description=description, completed=done, total=total)
