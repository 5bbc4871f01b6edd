"""Translates PostgreSQL's errors for the store: it is away, another try is due, or a row is not allowed."""

from __future__ import annotations

from typing import NoReturn

import asyncpg

from ...core.errors import StoreUnavailable
from ..database import ConstraintRefused

# The way to the server is to blame, or it starts, ends or has no place for another connection: soon it may be back.
AWAY = (
    OSError,  # TimeoutError among them
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
)
# The server, its disk or what we may do there is to blame; waiting does not help.
UNUSABLE = (
    asyncpg.InsufficientResourcesError,
    asyncpg.PostgresSystemError,
    asyncpg.PostgresIOError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.UndefinedTableError,
    asyncpg.LockNotAvailableError,
)
# Two transactions got in each other's way, and this one was undone.
AGAIN = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)


class OutcomeUnknown(StoreUnavailable):
    """The connection broke during a commit: the transaction may have been committed."""


def is_away(error: BaseException) -> bool:
    """Return whether the server is away; what is wrong with a statement's values is another error."""
    return isinstance(error, AWAY) and not isinstance(error, asyncpg.DataError | ValueError)


def raise_ours(error: Exception, what: str, *, unknown: bool = False) -> NoReturn:
    """Raise StoreUnavailable or Refused for an error; others as they are. `unknown`: it came while committing."""
    if isinstance(error, asyncpg.IntegrityConstraintViolationError):
        raise ConstraintRefused(str(error)) from error
    if not is_away(error) and not isinstance(error, (*UNUSABLE, *AGAIN)):
        raise error
    nothing = "; nothing was recorded, try again" if what == "written" else ""
    silent = "the server does not answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    message = str(error).partition("\n")[0] or silent
    if unknown:
        raise OutcomeUnknown(f"the store cannot be {what}: {message}; whether it was recorded is not known") from error
    raise StoreUnavailable(f"the store cannot be {what}: {message}{nothing}") from error
