"""What a record holds while it is measured: of earlier processes and of this one."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.kernel.rows import Item, Refusal, Row


class Session:
    """One process that begins or continues a record.

    Parameters
    ----------
    earlier
        Rows and refusals of earlier processes.
    """

    def __init__(self, earlier: Iterable[Item] = ()) -> None:
        self.items = {item.label: item for item in earlier}
        """By label; a later one replaces an earlier one."""
        self.dense: dict[str, Row] = {}
        """Dense rows that this process timed, by label, also where an earlier process's is the record's."""
        self._own: set[str] = set()

    @property
    def rows(self) -> list[Row]:
        """What was measured."""
        return [item for item in self.items.values() if isinstance(item, Row)]

    @property
    def refused(self) -> list[Refusal]:
        """What could not be."""
        return [item for item in self.items.values() if isinstance(item, Refusal)]

    def keep(self, item: Item) -> None:
        """Add what this process found."""
        self.items[item.label] = item
        self._own.add(item.label)

    def is_refused(self, label: str) -> bool:
        """Whether it need not be tried: it is not to be had here, or this process found it wrong."""
        item = self.items.get(label)
        return isinstance(item, Refusal) and (not item.wrong or label in self._own)

    def failed_before(self, label: str) -> bool:
        """Whether an earlier process found it wrong and this one has not tried it: want of memory may have passed."""
        return isinstance(self.items.get(label), Refusal) and not self.is_refused(label)

    def settle(self, label: str) -> None:
        """Drop an earlier process's verdict: tried again, it was right."""
        if self.failed_before(label):
            del self.items[label]
