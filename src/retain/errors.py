"""Errors that a user meets, and findings: each says what was seen, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DONE, FAILED, BAD_CONFIG, BUDGET_BROKEN, NOTHING_FITS, FOUND = range(6)
"""Exit codes of every command."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: a stable code, what was seen, its cause and the remedy."""

    code: str
    seen: str
    cause: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """One line for a person."""
        return " ".join(part for part in (self.seen, self.cause, self.remedy) if part)


class RetainError(Exception):
    """Base of every error that the command line prints without a traceback."""

    exit_code = FAILED


class ConfigError(RetainError):
    """The configuration or the arguments are wrong; holds every finding at once."""

    exit_code = BAD_CONFIG

    def __init__(self, findings: Sequence[Finding] | Finding | str) -> None:
        if isinstance(findings, str):
            findings = Finding("config", findings)
        self.findings = [findings] if isinstance(findings, Finding) else list(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))


class DataError(ConfigError):
    """The data cannot be used as configured: the file, the column and the rows are named."""


class RunError(RetainError):
    """A run directory cannot be used or a run cannot go on."""


class Stopped(RetainError):
    """A signal asked the run to stop; everything learned so far is saved.

    Attributes:
        exit_code: 128 + the signal's number, as shells report it.
    """

    def __init__(self, signal_number: int, message: str) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(message)
