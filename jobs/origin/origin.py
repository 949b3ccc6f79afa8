"""Where results come from: commit, machine, versions, command. By itself it prints the commit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ringmpi.provenance import package_versions, processor, system

ROOT = Path(__file__).resolve().parents[2]


def origin(script: str, variables: Sequence[str], seconds: float) -> list[str]:
    """Return where and how a page was made, as lines of Markdown.

    Parameters
    ----------
    script : str
        In jobs/.
    variables : sequence of str
        Environment variables that it heeds; those that are set belong to the command.
    seconds : float
        That it took.
    """
    asked = "".join(f"{name}={os.environ[name]} " for name in variables if name in os.environ)
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return [
        f"* made by `{asked}bash jobs/{script}` in {seconds / 60:.0f} minutes",
        f"* commit: {commit()}",
        f"* machine: {processor()}, {len(os.sched_getaffinity(0))} cores, {system()}",
        f"* Python {sys.version.split()[0]}, {versions}",
    ]


def commit() -> str:
    """Return what runs: a commit, and whether something that counts differs from it."""
    changed = _git("status", "--porcelain", "--", "ringmpi", "kernels", "jobs")
    return (_git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with changes" if changed else "")


def _git(*words: str) -> str:
    """Return what git says of the checkout; nothing where it says nothing."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    print(commit())
