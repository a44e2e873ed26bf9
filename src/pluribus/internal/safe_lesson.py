"""The lesson of a peer, learned again without the teacher whose message would spoil the student.

A peer method has no server whose state could be checked. A liar spoils the weights of its students instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from pluribus.client import Client
from pluribus.internal.blame import first_line
from pluribus.internal.safe_merge import Trouble, describe_size, is_usable, leave_out, sizes_of
from pluribus.internal.snapshot import Packed, Snapshot
from pluribus.message import LARGEST, Message

Lesson = Callable[[Mapping[int, Message]], None]


class SafeLesson:
    """Teaches one student. `lesson` starts the student's exchange anew each time."""

    def __init__(self, client: Client, lesson: Lesson) -> None:
        self._live, self._lesson = client.all_tensors(), lesson
        self._before = Snapshot(self._live)

    def __call__(self, messages: Mapping[int, Message]) -> dict[int, str]:
        """Learn from the messages of teachers. Returns the teachers that were left out, with the reason.

        What no teacher explains is the method's own doing: its error is raised, and what it keeps is kept.
        """
        return leave_out(messages, self._attempt, self._put_back, self._lesson)

    def _attempt(self, messages: Mapping[int, Message]) -> Trouble | None:
        try:
            self._lesson(messages)
        except (ArithmeticError, RuntimeError, ValueError) as error:  # what Python and torch raise for such numbers
            return Trouble(f"makes its student fail ({first_line(error)})", is_error=True)
        if not _may_be_spoiled(self._live):
            return None
        spoiled = {name: size for name, size in sizes_of(self._live).items() if not size <= LARGEST}
        before = self._before.views() if spoiled else {}
        for name, size in spoiled.items():
            if is_usable(before.get(name)):
                return Trouble(f"makes '{name}' of its student {describe_size(size)}", is_error=False)
        return None

    def _put_back(self) -> None:
        self._before.put_back(self._live)


def _may_be_spoiled(tensors: Mapping[str, Tensor]) -> bool:
    """Whether some number is too large. A GPU looks at a few blocks of memory, not at a thousand tensors."""
    blocks = {str(dtype): block for dtype, block in tensors.blocks.items()} if isinstance(tensors, Packed) else tensors
    return any(not size <= LARGEST for size in sizes_of(blocks).values())
