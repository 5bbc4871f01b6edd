"""Logs what people change, by the name and id of a key, never the key itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...store.keys import StoredKey

log = logging.getLogger("lightning_proxy.audit")


def log_change(change: str, *, once: bool = False, **fields: Any) -> None:
    """Log a change; `fields` are for JSON. `once`: every worker sees it, and one of them logs it."""
    log.info("%s", change, extra={"fields": {"event": "audit"} | fields, "once": once})


def log_keys(before: Sequence[StoredKey], after: Sequence[StoredKey]) -> None:
    """Log the keys that commands on the store made, revoked or purged meanwhile."""
    old, new = {key.key_id: key for key in before}, {key.key_id: key for key in after}
    for key_id, key in (old | new).items():
        was, now = old.get(key_id), new.get(key_id)
        rights = f"{key.role}, scope {key.scope}{', evaluator' * key.evaluator}"
        changes = {
            f"was created ({rights})": was is None,
            "was revoked": now is not None and not now.live and (was is None or was.live),
            "was purged": now is None,
        }
        for change in (change for change, is_so in changes.items() if is_so):
            log_change(f"key {key.name} (id {key_id}) {change}", once=True, key_id=key_id)
