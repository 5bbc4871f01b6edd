"""Base classes and types for all sections of the configuration, including features'."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from ..features import modules
from ..records import ModelCall
from .address import shown

Port = Annotated[int, Field(ge=0, le=65535)]
Natural = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]  # .inf too
Seconds = Above0
Share = Annotated[float, Field(gt=0, le=1)]
Unit = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
CanBeOff = BeforeValidator(lambda value: "off" if value is False else value)  # YAML reads off as false


def check_key(what: str, key: SecretStr | None) -> None:
    """Raise ValueError if the key is empty or a header cannot carry it unchanged."""
    text = "none" if key is None else key.get_secret_value()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"{what} cannot be sent: it must be ASCII without spaces or line breaks, and not empty")


def check_url(key: str, url: str, *, is_vllm: bool) -> str:
    """Return `url` if requests can be sent to it. Otherwise raise ValueError, which names `key`."""
    parts = urlsplit(url)
    try:
        host, _ = parts.hostname, parts.port
    except ValueError:  # no number; its own message quotes what may be a password with a slash in it
        host = None
    if parts.scheme not in ("http", "https") or not host or parts.fragment:
        raise ValueError(f"{key} must be an http(s) URL without a fragment, got {shown(url)!r}")
    if is_vllm and (parts.query or not parts.path.strip("/")):
        raise ValueError(f"{key} of a vLLM server must have a path, usually /v1, and no query; got {shown(url)!r}")
    return url


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    def faults(self) -> Iterator[str]:
        """Yield problems with the values that their types do not rule out. Only the first is shown."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_fault(self) -> Self:
        for fault in self.faults():
            raise ValueError(fault)
        return self

    def secret_keys(self) -> Iterator[str]:
        """Yield the secret keys, including those in nested sections."""
        for _, value in self:
            for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
                if isinstance(one, SecretStr):
                    yield one.get_secret_value()
                elif isinstance(one, Section):
                    yield from one.secret_keys()


class FeatureSection(Section):
    """The section of the configuration that has a feature's keys and its name.

    `functions`: the names of credits, baselines and losses that the feature adds, by kind. `moved`: the new names of
    renamed keys, by their old ones. `names_of_call_fields`: the fields that it adds to each call. The methods here
    answer as if the feature did not exist. Their `config` is the whole `Config`.
    """

    name: ClassVar[str]
    functions: ClassVar[Mapping[str, Sequence[str]]] = {}
    moved: ClassVar[Mapping[str, str]] = {}
    names_of_call_fields: ClassVar[Sequence[str]] = ()

    @classmethod
    def call_fields(cls, calls: Sequence[ModelCall]) -> Sequence[Mapping[str, Any]]:
        """Return the feature's fields for each call. `calls`: all of a rollout's calls, in order."""
        return [{}] * len(calls)

    def check(self, config: Any) -> None:
        """Raise ValueError, with a key's full name, if the section conflicts with others."""

    def merged_obstacle(self, config: Any) -> str | None:
        """Return why weights cannot be published merged; None if they can."""
        return None

    @property
    def trains_here(self) -> bool:
        """Return whether our own process, not a service, takes the training steps."""
        return True

    @property
    def has_guide(self) -> bool:
        """Return whether the feature scores tokens itself, so that even rollouts with equal rewards are trained on."""
        return False

    def training_weights(self, credits: Collection[str]) -> Mapping[str, float]:
        """Return the training weights of the feature's rewards, by name. `credits`: the credit functions in use."""
        return {}

    @property
    def longest_wait_s(self) -> float | None:
        """Return how long the feature's reward may take after a rollout's end; None if it gives no reward."""
        return None

    def not_absolute(self, names: Collection[str]) -> str | None:
        """Return why rewards with these names cannot measure how good a version is; None if they can."""
        return None


Kind = TypeVar("Kind", bound=FeatureSection)


class WithFeatures(Section):
    """A section that also gives access to the features' sections."""

    _sections: tuple[FeatureSection, ...] = PrivateAttr(())

    def with_features(self, sections: tuple[FeatureSection, ...]) -> Self:
        """Return a copy with these sections of features."""
        copy = self.model_copy()
        copy._sections = sections
        return copy

    @property
    def sections(self) -> tuple[FeatureSection, ...]:
        return self._sections

    def section(self, kind: type[Kind]) -> Kind:
        """Return a feature's section, with defaults if it is not configured."""
        return next((one for one in self.sections if isinstance(one, kind)), None) or kind()


@cache
def feature_sections() -> dict[str, type[FeatureSection]]:
    """Return the section classes of the installed features, by section name."""
    kinds = (kind for module in modules("config") for kind in vars(module).values() if isinstance(kind, type))
    return {kind.name: kind for kind in kinds if issubclass(kind, FeatureSection) and "name" in vars(kind)}
