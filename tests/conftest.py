"""Settings of the whole suite."""

from __future__ import annotations

import os
import re

import pytest

# Tiny tensors on few cores: more threads only wait for each other. Before torch is imported, and for subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

FORGIVEN = re.compile(r"\.\./shared|GPU|CUDA|root")
"""Reasons for which a test may be skipped where CI=true: what a CI machine cannot be asked to have."""

_unforgiven: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect skips that mean data were not fetched."""
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not FORGIVEN.search(reason):
            _unforgiven.append(f"{report.nodeid}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which skips count as failures."""
    for line in _unforgiven:
        terminalreporter.write_line(f"skipped for want of data, a failure in CI: {line}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session for them."""
    if _unforgiven and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
