"""The store: one object over the database, with a part for each type of record."""

from __future__ import annotations

from .calls import Calls, Events
from .conversations import ConversationIndex
from .database import Database
from .keys import Keyring
from .reports import Credit, Reports
from .rewards import Rewards
from .rollouts import Rollouts
from .training import TrainingSteps
from .versions import PolicyVersions
from .waiting import Waiting


class Store:
    """Reads and writes all records. A method that writes is one transaction, unless it says otherwise."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.rollouts = Rollouts(database)
        self.rewards = Rewards(database)
        self.calls = Calls(database, self.rollouts, self.rewards)
        self.events = Events(database)
        self.versions = PolicyVersions(database)
        self.steps = TrainingSteps(database, self.versions)
        self.credit = Credit(database)
        self.reports = Reports(database)
        self.waiting = Waiting(database)
        self.keys = Keyring(database)
        self.conversations = ConversationIndex(database)
