"""How far a command has come, on stderr."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_PARTS = 4


class Bars(Progress):
    """A bar for each task while somebody watches; in a log, a line whenever something else begins or a quarter more is done.

    Args:
        width: Of the names, in characters.
    """

    def __init__(self, width: int, console: Console | None = None) -> None:
        columns = (TextColumn(f"{{task.description:{width}}}"), BarColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console or Console(stderr=True), transient=True)
        self._said: set[tuple[TaskID, str, int]] = set()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self.console.is_terminal:
            return
        task = next(task for task in self.tasks if task.id == task_id)
        said = (task_id, task.description, int(_PARTS * task.percentage / 100))
        if said not in self._said:
            self._said.add(said)
            self.console.print(f"{task.description}: {task.percentage:.0f} %", highlight=False, markup=False)
