"""How many examples hypothesis tries: few and always the same in `make test`, many and new ones in `make test-all`."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

SHARE = 10  # `make test` tries one example in ten

# The machine may be busy: what is slow is no fault.
_ANY_MACHINE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", derandomize=True, max_examples=20, **_ANY_MACHINE)
settings.register_profile("long", derandomize=False, **_ANY_MACHINE)


def examples(count: int, **more: Any) -> settings:
    """Settings for a test that is to have `count` examples, in place of 100, with `--hypothesis-profile=long`."""
    quick = settings().derandomize
    return settings(max_examples=max(count // SHARE, 1) if quick else count, **more)
