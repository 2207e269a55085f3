"""Trackers mirror a run; local files are the source of truth, so a tracker never fails or delays a run."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from experiments.progress import console


class Tracker(Protocol):
    """What a runner tells a tracker."""

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers of one finished sample."""

    def finish(self, summary: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Record the run's summary and per-layer tables, and end."""


class NoTracker:
    """``tracker=none``."""

    def log(self, values: Mapping[str, Any]) -> None:
        """Do nothing."""

    def finish(self, summary: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Do nothing."""


class WandbTracker:
    """``tracker=wandb``: online where a key is configured, offline otherwise.

    Starting wandb takes seconds, so it starts in a thread while weights load; a failure in it is
    reported once and the run goes on.

    Parameters
    ----------
    run_id
        Our identity; wandb's id derives from it, so that a resumed run continues the same record.
    config
        Resolved configuration.
    folder
        Where wandb keeps its files.
    """

    def __init__(self, run_id: str, config: Mapping[str, Any], folder: Path) -> None:
        self._run: Any = None
        self._failed = False
        self._starter = threading.Thread(target=self._start, args=(run_id, dict(config), folder), daemon=True)
        self._starter.start()

    def _start(self, run_id: str, config: dict[str, Any], folder: Path) -> None:
        try:
            os.environ.setdefault("WANDB_SILENT", "true")
            folder.mkdir(parents=True, exist_ok=True)
            import wandb

            logging.getLogger("wandb").setLevel(logging.ERROR)
            mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "ffd"),
                id=run_id,
                name=run_id,
                config=config,
                dir=str(folder),
                mode=mode,
                resume="allow" if mode == "online" else None,
                settings=wandb.Settings(console="off", init_timeout=30, x_disable_stats=True),
            )
        except Exception as error:  # whatever wandb does, the run goes on
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if not self._failed:
            console.print(f"wandb: {type(error).__name__}: {error}; the run goes on without it")
        self._failed = True

    def _guarded(self, action: Any) -> None:
        self._starter.join(timeout=60)
        if self._failed or self._run is None:
            return
        try:
            action()
        except Exception as error:
            self._give_up(error)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers of one finished sample."""
        self._guarded(lambda: self._run.log(dict(values)))

    def finish(self, summary: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Record the summary and the per-layer tables, and end the wandb run inside this job."""

        def record() -> None:
            import wandb

            for name, rows in tables.items():
                if rows:
                    columns = list(rows[0])
                    data = [[row[c] for c in columns] for row in rows]
                    self._run.log({name: wandb.Table(columns=columns, data=data)})
            self._run.summary.update(_flat(summary))
            self._run.finish()

        self._guarded(record)


def make_tracker(name: str, run_id: str, config: Mapping[str, Any], root: Path) -> Tracker:
    """Build the tracker a run asked for."""
    return WandbTracker(run_id, config, root / "wandb") if name == "wandb" else NoTracker()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return "wandb" in netrc.read_text()
    except OSError:
        return False


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            flat.update(_flat(item, name + "."))
        else:
            flat[name] = item
    return flat
