"""The keys, from the descriptions of the bindings themselves, and the words of the screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.binding import Binding, BindingsMap, BindingType

from weightcache.tui.facts import Fact
from weightcache.tui.screens.view import ReadingView
from weightcache.tui.state import State

WORDS: list[Fact] = [
    ("Words", ""),
    ("weights", "resident sets: held by the agent, whether engines use them or not"),
    ("engines", "what attached engines use of the device besides the weights: KV cache, graphs, context"),
    ("other", "other processes, and what the driver keeps for itself"),
    ("unsafe", "the service manager dropped the descriptors: a crash of the agent would lose the weights"),
    ("gone", "an engine still maps a set that the agent no longer holds"),
    ("-", "not known"),
]


class Help(ReadingView):
    """All keys in groups of (title, bindings)."""

    def __init__(self, state: State, groups: Sequence[tuple[str, Sequence[BindingType]]]) -> None:
        super().__init__(state)
        self._groups = groups

    def show(self) -> None:
        """List the keys."""
        super().show()
        facts: list[Fact] = []
        for title, bindings in self._groups:
            facts += [(title, ""), *self._keys(BindingsMap(bindings))]
        self.text(facts + WORDS)

    def _keys(self, bindings: Iterable[tuple[str, Binding]]) -> list[Fact]:
        described: dict[str, list[str]] = {}
        for _, binding in bindings:
            keys = described.setdefault(binding.tooltip or binding.description, [])
            if (name := self.app.get_key_display(binding)) not in keys:
                keys.append(name)
        return [(" ".join(keys), about) for about, keys in described.items() if about]
