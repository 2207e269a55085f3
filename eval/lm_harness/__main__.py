"""lm-eval's command line with our model: ``python -m eval.lm_harness --model ffd --model_args ... --tasks ...``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from eval.lm_harness.arguments import HarnessError, parse

USAGE_EXIT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run lm-eval's command line; returns the exit code.

    Parameters
    ----------
    arguments
        As lm-eval's own command takes them; ``sys.argv`` without the program's name if None.
    """
    try:
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed; pip install 'ffd[lm-eval]'", file=sys.stderr)
        return USAGE_EXIT
    from eval.models import ModelError

    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]
    setup_logging()
    cli = HarnessCLI()
    parsed = cli.parse_args()
    try:
        if getattr(parsed, "command", None) == "run":
            _prepare(parsed)
        cli.execute(parsed)
    except (ValueError, ModelError) as error:
        # Both lm-eval's complaints (unknown tasks, contradicting options) and ours are ValueErrors of one line.
        logging.getLogger("lm_eval").debug("where it happened", exc_info=True)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_EXIT
    return 0


def _prepare(parsed: argparse.Namespace) -> None:
    """Check what concerns our model before lm-eval spends minutes on its tasks, and register it."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    settings: dict[str, Any] = EvaluatorConfig.load_yaml_config(parsed.config) if parsed.config else {}
    settings.update({key: value for key, value in vars(parsed).items() if value is not None})
    if settings.get("model") != "ffd":
        return
    from eval.lm_harness.model import RESPONSE_CACHE

    if settings.get("use_cache"):
        raise HarnessError(RESPONSE_CACHE)
    if "device" not in settings:
        parsed.device = "auto"  # lm-eval's default is cuda:0, there or not
    given = settings.get("model_args") or {}
    if isinstance(given, Mapping):
        parse({**given, "device": settings.get("device", "auto")})


if __name__ == "__main__":
    sys.exit(main())
