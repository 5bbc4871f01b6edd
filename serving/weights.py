"""Finds the weights of a policy version, and the names and labels under which vLLM serves them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..core.errors import NotFound
from ..core.records import PolicyVersion, PublishMode

LOADED = "loaded "  # before the label of weights that are served to nobody yet


def obstacle(version: PolicyVersion, mode: PublishMode) -> str | None:
    """Return why a version cannot be made live where versions are served in this `mode`; None if it can."""
    if version.version == 0:
        return None
    if version.status == "failed":
        return "its publishing failed"
    if version.status == "publishing":
        return "it is being published"
    if version.path is None or not Path(version.path).is_dir():
        return "its files are gone"
    return None if version.publish in (None, mode) else f"it was published as {version.publish}"


def files_of(version: PolicyVersion) -> str:
    """Return the directory of a version's files; NotFound if it is gone."""
    if version.path is None or not Path(version.path).is_dir():
        raise NotFound(f"the files of policy version {version.version} are gone: {version.path}")
    return version.path


def adapters_of(version: PolicyVersion) -> dict[str, str]:
    """Return the directory of each adapter, by the name that it is served under; NotFound if one is gone."""
    if version.version == 0:
        return {}
    files_of(version)
    paths = _named_paths(version)
    if gone := [path for path in paths.values() if not Path(path).is_dir()]:
        raise NotFound(f"files of policy version {version.version} are gone: {gone[0]}")
    return paths


def fault_of(version: PolicyVersion, served: Mapping[str, str | None]) -> str | None:
    """Return why a server does not serve the version; None if it does.

    `served`: the paths that its models were loaded from, by name, as far as it says.
    """
    found = [(path, served.get(name, "")) for name, path in _named_paths(version).items()]
    if any(root == "" for _, root in found):
        return "does not serve"
    return "serves other weights as" if any(root not in (path, None) for path, root in found) else None


def _named_paths(version: PolicyVersion) -> dict[str, str]:
    own = {name: f"{version.path}/{directory}" for directory, name in version.adapters.items()}
    return {str(version.served_model): str(version.path)} | own


def labels_of(version: PolicyVersion) -> tuple[str, ...]:
    """Return vLLM's weight version for ours. The time tells stores apart; `default` is vLLM's after a start."""
    label = f"{version.version}-{int(version.created_at)}"
    return (label,) if version.version else (label, "default")
