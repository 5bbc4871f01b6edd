-- schema 1
-- Prompts that are put in the place of an agent's own, which changes nothing.
CREATE TABLE prompts (
    name       TEXT PRIMARY KEY,
    agent      TEXT,                              -- of the message; NULL: only its text tells
    role       TEXT NOT NULL,                     -- system | user
    created_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE prompt_versions (
    rowid      INTEGER PRIMARY KEY,               -- order of making
    name       TEXT NOT NULL REFERENCES prompts (name),
    version    INTEGER NOT NULL,                  -- 1, 2, 3, …; 1 is the agent's own text
    text       TEXT NOT NULL,
    parent     INTEGER,                           -- the version that it was made from
    comment    TEXT,
    metrics    TEXT NOT NULL DEFAULT '{}',        -- JSON
    created_at REAL NOT NULL,
    UNIQUE (name, version)
);
-- Which versions were live, in order. A prompt's newest row is its live one.
CREATE TABLE prompt_log (
    n       INTEGER PRIMARY KEY,
    name    TEXT NOT NULL,
    version INTEGER NOT NULL,
    FOREIGN KEY (name, version) REFERENCES prompt_versions (name, version)
);
CREATE INDEX prompt_log_by_name ON prompt_log (name, n);

-- The version of each prompt that a rollout began with, and keeps.
CREATE TABLE rollout_prompts (
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    name       TEXT NOT NULL,
    version    INTEGER NOT NULL,
    PRIMARY KEY (rollout_id, name)
) WITHOUT ROWID;
CREATE INDEX rollout_prompts_by_version ON rollout_prompts (name, version);

-- What the model was shown in the place of what an agent sent. `sent` is NULL where that was the text of `sent_version`.
CREATE TABLE call_prompts (
    call_id      TEXT NOT NULL REFERENCES calls (call_id) ON DELETE CASCADE,
    name         TEXT NOT NULL,
    version      INTEGER NOT NULL,
    place        TEXT NOT NULL,                   -- JSON: the way to the text in the request
    sent_version INTEGER,
    sent         TEXT,
    PRIMARY KEY (call_id, name)
) WITHOUT ROWID;
