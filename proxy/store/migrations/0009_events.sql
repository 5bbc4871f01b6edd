-- What an agent says of itself between its calls: the state it is in, actions that no model chose, notes.
CREATE TABLE events (
    event_id   INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    seq        INTEGER NOT NULL,                  -- of the call that comes next: so many had begun
    kind       TEXT NOT NULL,                     -- state | action | note
    agent      TEXT,
    name       TEXT,
    value      TEXT,                              -- JSON, as arguments and result
    arguments  TEXT,
    result     TEXT,
    is_error   INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL
);
CREATE INDEX events_by_rollout ON events (rollout_id, event_id);
