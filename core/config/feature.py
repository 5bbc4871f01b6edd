"""The sections of the configuration that features bring, and what the core asks all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, TypeVar

from ..features import modules
from ..records import ModelCall
from .section import Section


class FeatureSection(Section):
    """A feature's keys: the section of the configuration that has the feature's name.

    `functions`: names of credits, baselines and losses that it adds, by kind. `moved`: where keys once were, and
    where they are. `names_of_call_fields`: what it says of each call. Each question below is answered as if the feature
    were not there.
    """

    name: ClassVar[str]
    functions: ClassVar[Mapping[str, Sequence[str]]] = {}
    moved: ClassVar[Mapping[str, str]] = {}
    names_of_call_fields: ClassVar[Sequence[str]] = ()

    @classmethod
    def call_fields(cls, calls: Sequence[ModelCall]) -> Sequence[Mapping[str, Any]]:
        """Return its fields of each of a rollout's calls, which are all of it, in order."""
        return [{}] * len(calls)

    @property
    def trains_here(self) -> bool:
        """Return whether a process of ours takes the steps, and no service."""
        return True

    @property
    def has_guide(self) -> bool:
        """Return whether it says more of tokens than their rewards do, also where all rewards are equal."""
        return False

    def training_weights(self, credits: Collection[str]) -> Mapping[str, float]:
        """Return the weights by which its own rewards count in training, by name. `credits`: the ones in use."""
        return {}

    @property
    def longest_wait_s(self) -> float | None:
        """Return how long its reward for a rollout may take once that has ended; None if it gives none."""
        return None

    def not_absolute(self, names: Collection[str], *, has_function: bool) -> str | None:
        """Return why rewards of these names cannot tell how good a version is; None if they can.

        `has_function`: a function of the user's may give rewards of any name.
        """
        return None


Kind = TypeVar("Kind", bound=FeatureSection)


class Sections(tuple[FeatureSection, ...]):
    """The sections of the installed features."""

    def section(self, kind: type[Kind]) -> Kind:
        """Return one; with its defaults if it was not handed in."""
        return next((one for one in self if isinstance(one, kind)), None) or kind()


@cache
def feature_sections() -> dict[str, type[FeatureSection]]:
    """Return the kinds of sections of the installed features, by name."""
    found = (kind for module in modules("config") for kind in vars(module).values() if isinstance(kind, type))
    return {kind.name: kind for kind in found if issubclass(kind, FeatureSection) and "name" in vars(kind)}
