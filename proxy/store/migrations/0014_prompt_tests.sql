-- Tests of prompt versions before they go live (prompts.promotion: gated). At most one a prompt is under way.
CREATE TABLE prompt_tests (
    n          INTEGER PRIMARY KEY,
    name       TEXT NOT NULL,
    version    INTEGER NOT NULL,
    against    INTEGER NOT NULL,                  -- the live version that it is compared with
    status     TEXT NOT NULL,                     -- testing | promoted | rejected | ended
    reason     TEXT,                              -- why it was decided so
    evidence   TEXT NOT NULL DEFAULT '{}',        -- JSON: the numbers so far, or those that were decided by
    began_at   REAL NOT NULL,
    decided_at REAL,
    FOREIGN KEY (name, version) REFERENCES prompt_versions (name, version)
);
CREATE UNIQUE INDEX prompt_tests_testing ON prompt_tests (name) WHERE status = 'testing';
CREATE INDEX prompt_tests_by_version ON prompt_tests (name, version, n);

-- The version of a prompt that is tested next.
CREATE TABLE prompt_waiting (
    name    TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    FOREIGN KEY (name, version) REFERENCES prompt_versions (name, version)
) WITHOUT ROWID;

-- The rollouts of a test, in the order in which they began to use the prompt. `place` counts those of a task (NULL: of
-- none), from 0; `version` is the one that the rollout keeps.
CREATE TABLE prompt_test_rollouts (
    n          INTEGER PRIMARY KEY,
    test       INTEGER NOT NULL REFERENCES prompt_tests (n) ON DELETE CASCADE,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    task_id    TEXT,
    place      INTEGER NOT NULL,
    version    INTEGER NOT NULL,
    compared   INTEGER NOT NULL,                  -- 0: it is left to the live version, beyond the share of the test
    at         REAL NOT NULL
);
CREATE INDEX prompt_test_rollouts_by_rollout ON prompt_test_rollouts (rollout_id);
CREATE INDEX prompt_test_rollouts_by_task ON prompt_test_rollouts (test, task_id, place);
CREATE INDEX prompt_test_rollouts_compared ON prompt_test_rollouts (test, n) WHERE compared = 1;
