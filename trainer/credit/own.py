"""Credit by a user's own function (`trainer.credit: FILE.py:NAME`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ..functions import faults, load
from ..types import Sibling

SETTING = "trainer.credit"


def own_credit(name: str, group: Sequence[Sibling], config: TrainerConfig) -> list[list[float]]:
    """Return the function's advantages: one per call, one list per sibling. Raise ConfigError otherwise."""
    function = load(SETTING, name)
    with faults(SETTING, name):
        found = function(group, config)
    if not isinstance(found, Sequence) or len(found) != len(group):
        raise ConfigError(
            f"{SETTING} {name}: one list for each of the {len(group)} rollouts is needed, got {found!r:.100}"
        )
    return [_checked(name, values, sibling) for values, sibling in zip(found, group, strict=True)]


def _checked(name: str, values: object, sibling: Sibling) -> list[float]:
    calls = len(sibling.calls)
    if not isinstance(values, Sequence) or len(values) != calls:
        raise ConfigError(f"{SETTING} {name}: a rollout of {calls} calls needs as many numbers, got {values!r:.100}")
    for value in values:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ConfigError(f"{SETTING} {name}: {value!r:.100} is no finite number")
    return [float(value) for value in values]
