"""What a dry run would have to download before it could plan: it says so and downloads nothing."""

from __future__ import annotations

from experiments.config import RunConfig


def unfetched(config: RunConfig) -> str | None:
    """The line of a dry run whose model or data are not at hand; None where they are, or none are needed.

    The hub's models are not meant: of those a dry run reads configuration and tokenizer alone.

    Raises
    ------
    UsageError
        For a task that cannot be had as asked.
    """
    from eval.data import SOURCES, at_hand

    needed = [name for name in dict.fromkeys((*_model(config), *_data(config))) if not at_hand(name)]
    if not needed:
        return None
    by_origin: dict[str, list[str]] = {}
    for name in needed:
        origin = SOURCES[name].origin
        by_origin.setdefault(f"{origin} ({origin.download_size / 1e6:.1f} MB)", []).append(name)
    fetched = ", ".join(f"{' and '.join(names)} from {origin}" for origin, names in by_origin.items())
    command = f"python -m eval.data fetch {' '.join(needed)}"
    return (
        f"dry run: nothing was run or fetched; a run would first fetch {fetched}; with it ({command}) it can be planned"
    )


def _reads_prompts(config: RunConfig) -> bool:
    studied = config.runner in ("fidelity", "calibrate")
    if config.replays or (studied and config.fidelity.text_file is not None):
        return False
    return studied or config.runner in ("accuracy", "prompts")


def _model(config: RunConfig) -> tuple[str, ...]:
    from eval.model_files import data_source

    random_weights = config.runner == "throughput" and config.bench.geometry is not None
    if random_weights or config.replays or config.runner == "kernel":
        return ()
    source = data_source(str(config.model["name"]), config.model["path"])
    return () if source is None else (source,)


def _data(config: RunConfig) -> tuple[str, ...]:
    if not _reads_prompts(config):
        return ()
    import torch

    from eval.suites import data_sources
    from experiments.defaults import LONGEST_DEFAULT, fill_task
    from experiments.refusals import refusals

    has_gpu = torch.cuda.is_available()
    task, _ = fill_task(config.task, runner=config.runner, context_length=LONGEST_DEFAULT, has_gpu=has_gpu)
    with refusals():
        return data_sources(task)
