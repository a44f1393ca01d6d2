"""What one layout's run knows so far: figures, what was wrong, which steps are done, and how much time is left."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Notes:
    """Written to ``file`` after every step, so that a run that was cut off tells how far it got.

    ``failed`` is the error that ended the run; ``broken`` is what was not as it should be, while the run went on.
    """

    file: Path
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    failed: str = ""
    _begin: float = field(default_factory=time.monotonic)

    def note(self, name: str, value: Any) -> None:
        """A figure."""
        self.figures[name] = value

    def check(self, holds: bool, otherwise: str) -> None:
        """Note what is wrong, and go on."""
        if not holds:
            self.broken.append(otherwise)

    def left(self, most: float) -> float:
        """How long the next wait may take. Raises TimeoutError when no time is left."""
        left = self._begin + self.seconds - time.monotonic()
        if left <= 1:
            raise TimeoutError("no time was left")
        return min(most, left)

    def finish(self, step: str) -> None:
        """A step is done."""
        self.done.append(step)
        self.write()

    def write(self) -> None:
        """Write what is known by now."""
        body = {"figures": self.figures, "broken": self.broken, "done": self.done, "failed": self.failed}
        self.file.write_text(json.dumps(body, indent=1))

    def say(self) -> int:
        """Print what was wrong; the exit status."""
        for sentence in [*self.broken, *([self.failed] if self.failed else [])]:
            print(f"WRONG {sentence[:5000]}")
        return 1 if self.broken or self.failed else 0
