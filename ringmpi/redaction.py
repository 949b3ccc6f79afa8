"""What must not be told: secrets, and who the user is, in texts that go into a file or on a page.

Of the environment only listed variables are told at all (`ringmpi.provenance`). This is for what remains:
command lines, paths, and the values of those variables, in which a secret may stand by mistake.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

#: What stands in the place of a secret, and of the user's name.
REDACTED = "[redacted]"
USER = "<user>"

#: Tokens are also what a sequence has, and are no secret.
_WORDS = (
    r"token(?!s)|passw(?:or)?d|passphrase|secret|(?:api|access|private)_?key|credential|jwt|auth(?!or)"
)

#: Names of environment variables whose values are secrets.
_SECRET_NAME = re.compile(rf"{_WORDS}|(?:^|_)(?:key|pass|pat)(?:_|$)", re.IGNORECASE)

#: Characters from which on the value of such a variable is looked for elsewhere; a shorter one, such as
#: 1 or yes, would be found in everything.
LEAST = 8

#: Names shorter than this would be found in everything, and name nobody.
LEAST_USER = 3

#: Users that stand for no person.
NOBODY = ("root", "user", "ubuntu", "runner", "nobody")

#: Secrets that are known by their form, and what takes their place.
_FORMS = (
    # scheme://user:password@host and scheme://token@host, as in the addresses of git.
    (re.compile(r"(?<=://)[^/\s@'\"]+(?=@)"), REDACTED),
    # name=value, name: value, and --name value.
    (re.compile(rf"(?i)([\w.]*(?:{_WORDS})[\w.]*\s*[=:]\s*)[^\s'\"&,;/]+"), rf"\g<1>{REDACTED}"),
    (re.compile(rf"(?i)(--[\w-]*(?:{_WORDS})[\w-]*\s+)[^\s'\"-][^\s'\"]*"), rf"\g<1>{REDACTED}"),
    # JSON web tokens, such as Slurm's.
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+"), REDACTED),
    # Keys of GitHub, GitLab, Hugging Face, Slack and AWS.
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|xox[abprs]-|AKIA|ASIA)[\w-]{10,}"), REDACTED),
)


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text without the secrets that can be known: by their form, or from the environment. Local.

    >>> redacted("--input https://me:hunter2@host/qkv.h5 --output token=abc", {})
    '--input https://[redacted]@host/qkv.h5 --output token=[redacted]'
    """
    environment = os.environ if environment is None else environment
    secrets = [value for name, value in environment.items() if _SECRET_NAME.search(name)]
    # Long ones first: one may be part of another.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= LEAST:
            text = text.replace(secret, REDACTED)
    for form, replacement in _FORMS:
        text = form.sub(replacement, text)
    return text


def anonymous(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text without secrets, the user's name and the place of the user's home. Local.

    >>> anonymous("/home/ada/venv/bin/mpiexec, /scratch/ada/x", {"HOME": "/home/ada", "USER": "ada"})
    '~/venv/bin/mpiexec, /scratch/<user>/x'
    """
    environment = os.environ if environment is None else environment
    text = redacted(text, environment)
    home = environment.get("HOME", "").rstrip("/")
    if home:
        text = re.sub(rf"{re.escape(home)}(?=[/\s,;:)'\"]|$)", "~", text)
    names = {environment.get(name, "") for name in ("USER", "LOGNAME", "SLURM_JOB_USER")}
    for name in {*names, Path(home).name} - {*NOBODY, ""}:
        if len(name) >= LEAST_USER:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", USER, text)
    return text
