-- Tests of new policy versions before they go live (policy.promotion: gated). A policy version's status may also be
-- waiting | candidate | rejected. At most one test is under way.
CREATE TABLE promotions (
    n          INTEGER PRIMARY KEY,
    version    INTEGER NOT NULL REFERENCES policy_versions (version),
    against    INTEGER NOT NULL REFERENCES policy_versions (version),  -- the live version that it is compared with
    status     TEXT NOT NULL,                     -- testing | promoted | rejected | ended
    reason     TEXT,                              -- why it was decided so
    evidence   TEXT NOT NULL DEFAULT '{}',        -- JSON: the numbers so far, or those that were decided by
    began_at   REAL NOT NULL,
    decided_at REAL
);
CREATE UNIQUE INDEX promotions_testing ON promotions (status) WHERE status = 'testing';
CREATE INDEX promotions_by_version ON promotions (version, n);

-- The rollouts of a test. `place` counts those of a task (NULL: of none), from 0; `version` answers the rollout.
CREATE TABLE promotion_rollouts (
    rollout_id TEXT PRIMARY KEY REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    promotion  INTEGER NOT NULL REFERENCES promotions (n) ON DELETE CASCADE,
    task_id    TEXT,
    place      INTEGER NOT NULL,
    version    INTEGER NOT NULL,
    compared   INTEGER NOT NULL                   -- 0: it is left to the live version, beyond the share of the test
) WITHOUT ROWID;
CREATE INDEX promotion_rollouts_by_task ON promotion_rollouts (promotion, task_id, place);
CREATE INDEX promotion_rollouts_compared ON promotion_rollouts (promotion) WHERE compared = 1;

CREATE TRIGGER feed_of_promotions AFTER UPDATE OF evidence, status ON promotions BEGIN
    INSERT INTO feed (kind, ref) VALUES ('version', NEW.version);
END;
