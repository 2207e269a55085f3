"""Ask the Hugging Face hub once whether a file can be had, before any client with long retries does.

The hub client repeats a failed request five times per file with growing pauses and a warning each;
a machine without network would wait minutes for one answer. One plain request decides here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

ANSWER_SECONDS = 15
"""Longest wait for the hub's answer."""


class HubRefusal(Exception):  # noqa: N818 - says what happened
    """The hub does not hand out a file; the text is one line that says why and what would help."""


def require(repo: str, filename: str, *, repo_type: str = "model", revision: str | None = None) -> None:
    """Return if a file of a hub repository is cached or can be downloaded now.

    Parameters
    ----------
    repo : str
        Repository, e.g. ``Qwen/Qwen3-8B``.
    filename : str
        File in the repository.
    repo_type : {"model", "dataset"}
    revision : str, optional
        Branch, tag or commit; the default branch if None.

    Raises
    ------
    HubRefusal
        Gated without access, unknown repository, revision or file, or no answer within
        `ANSWER_SECONDS` (no network, or the client is set to work offline).
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    if isinstance(hub.try_to_load_from_cache(repo, filename, revision=revision, repo_type=repo_type), str):
        return
    try:
        url = hub.hf_hub_url(repo, filename, repo_type=repo_type, revision=revision)
        hub.get_hf_file_metadata(url, timeout=ANSWER_SECONDS)
    except errors.GatedRepoError:
        raise HubRefusal(
            f"{repo} is gated: accept its terms on its hub page, then run `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubRefusal(
            f"the hub has no {repo_type} {repo} that this login may see; check the name, or run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubRefusal(f"{repo} has no revision {revision!r} on the hub") from None
    except errors.EntryNotFoundError:
        raise HubRefusal(f"{repo} has no file {filename} on the hub") from None
    except errors.OfflineModeIsEnabled:
        raise HubRefusal(f"{repo} is not in the hub's local cache and HF_HUB_OFFLINE is set") from None
    except Exception as error:  # the client passes on whatever its transport raises
        detail = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise HubRefusal(f"no answer from the hub for {repo} ({detail}); check the network") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the hub client's and transformers' warnings and progress bars off the terminal."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        transformers_logging.disable_progress_bar()
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
