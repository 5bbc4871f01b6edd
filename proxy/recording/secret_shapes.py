"""The patterns of well-known secrets. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple


class SecretShape(NamedTuple):
    """A kind of secret. Every text with such a secret contains one of the `hints`, which are cheap to find."""

    hints: tuple[str, ...]
    pattern: re.Pattern[str]


# Not in the middle of a word ("risk-…"), but behind an escape: JSON in a string has "\nsk-…", a URL "%20sk-…".
_ESCAPED = r"(?<=\\[bfnrt])|(?<=\\u[0-9A-Fa-f]{4})|(?<=%[0-9A-Fa-f]{2})"
_START = f"(?:(?<![A-Za-z0-9])|{_ESCAPED})"


# One that is cut off is a key still.
_KEY_BLOCK = r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [^-]*-----|\Z)"
_AWS_SECRET = r"(?i:(?:aws|s3)_?secret_?(?:access_?)?key|secret_?access_?key)\W{1,8}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
# A JSON Web Token. Tried once in a run of its characters: or the time would grow with the square of the run's length.
_WEB_TOKEN = rf"(?:(?<![A-Za-z0-9_-])|{_ESCAPED})eyJ[A-Za-z0-9_-]{{8,}}(?:\.[A-Za-z0-9_-]*){{2,4}}"
# "The bearer of responsibilities" is no token.
_BEARER = r"(?i:bearer)\s+(?:(?=[A-Za-z._~+/-]{0,100}\d)[\w.~+/-]{16,}|[\w.~+/-]{32,})=*"


def _token(*hints: str, then: str) -> SecretShape:
    return SecretShape(hints, re.compile(_START + f"(?:{'|'.join(map(re.escape, hints))})" + then))


SHAPES = (
    _token("lpk-agent-", "lpk-admin-", "lpk-rollout-", then=r"[\w-]{20,}"),
    # OpenAI's and Anthropic's; words joined by hyphens are no key.
    _token("sk-", then=r"(?=[A-Za-z_-]{0,100}[0-9A-Z])[A-Za-z0-9_-]{20,}"),
    _token("sk_live_", "sk_test_", "rk_live_", "rk_test_", then=r"[A-Za-z0-9]{16,}"),
    _token("AKIA", "ASIA", then=r"[A-Z0-9]{16}"),
    _token("AIza", then=r"[A-Za-z0-9_-]{35}"),
    _token("ghp_", "gho_", "ghu_", "ghs_", "ghr_", then=r"[A-Za-z0-9]{36,}"),
    _token("github_pat_", then=r"[A-Za-z0-9_]{22,}"),
    _token("glpat-", then=r"[A-Za-z0-9_-]{20,}"),
    _token("hf_", then=r"[A-Za-z0-9]{30,}"),
    _token("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "xapp-", then=r"[A-Za-z0-9-]{10,}"),
    _token("hooks.slack.com/services/", then=r"[A-Za-z0-9/_-]{20,}"),
    SecretShape(("eyJ",), re.compile(_WEB_TOKEN)),
    SecretShape(("PRIVATE KEY",), re.compile(_KEY_BLOCK)),
    SecretShape(("ecret", "ECRET"), re.compile(_AWS_SECRET)),
    SecretShape(("bearer", "Bearer", "BEARER"), re.compile(_BEARER)),
)
