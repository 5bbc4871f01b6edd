-- schema 1
-- Tests of new policy versions before they go live (promotion.mode: gated). At most one is under way.
CREATE TABLE promotions (
    n          INTEGER PRIMARY KEY,
    version    INTEGER NOT NULL REFERENCES policy_versions (version),
    against    INTEGER NOT NULL REFERENCES policy_versions (version),  -- the live version that it is compared with
    status     TEXT NOT NULL,                     -- testing | promoted | rejected | ended
    reason     TEXT,                              -- why it was decided so
    evidence   TEXT NOT NULL DEFAULT '{}',        -- JSON: the numbers so far, or at the decision
    began_at   REAL NOT NULL,
    decided_at REAL
);
CREATE UNIQUE INDEX promotions_testing ON promotions (status) WHERE status = 'testing';
CREATE INDEX promotions_by_version ON promotions (version, n);

-- The rollouts of a test. `place` counts rollouts of a task (NULL: of none) and of a key, from 0; `version` answers the
-- rollout. `opened_by`: the key that opened it; '': one that gives evidence.
CREATE TABLE promotion_rollouts (
    rollout_id TEXT PRIMARY KEY REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    promotion  INTEGER NOT NULL REFERENCES promotions (n) ON DELETE CASCADE,
    task_id    TEXT,
    place      INTEGER NOT NULL,
    version    INTEGER NOT NULL,
    compared   INTEGER NOT NULL,                  -- 0: it is left to the live version, beyond the share of the test
    opened_by  TEXT NOT NULL DEFAULT '',
    evidence   INTEGER NOT NULL DEFAULT 0         -- 1: it was opened by a key that gives evidence, or has a reward of one
) WITHOUT ROWID;
CREATE INDEX promotion_rollouts_by_task ON promotion_rollouts (promotion, task_id, opened_by, place);
CREATE INDEX promotion_rollouts_compared ON promotion_rollouts (promotion) WHERE compared = 1 AND evidence = 1;

CREATE TRIGGER feed_of_promotions AFTER UPDATE OF evidence, status ON promotions BEGIN
    INSERT INTO feed (kind, ref) VALUES ('version', NEW.version);
END;
-- Whoever makes a version live decides about the one that is tested. A test that made it live is decided already.
CREATE TRIGGER test_of_policy_ended AFTER INSERT ON policy_log BEGIN
    UPDATE promotions SET status = 'ended', decided_at = NEW.at,
        reason = 'version ' || NEW.version || ' was made live during the test'
    WHERE status = 'testing';
END;
CREATE TRIGGER promotion_evidence AFTER INSERT ON rewards WHEN NEW.evidence = 1 BEGIN
    UPDATE promotion_rollouts SET evidence = 1 WHERE rollout_id = NEW.rollout_id AND evidence = 0;
END;
-- What is evidence by its rewards alone is none once they are taken back.
CREATE TRIGGER promotion_evidence_taken_back AFTER DELETE ON rewards WHEN OLD.evidence = 1 BEGIN
    UPDATE promotion_rollouts SET evidence = 0 WHERE rollout_id = OLD.rollout_id AND opened_by <> ''
    AND NOT EXISTS (SELECT 1 FROM rewards WHERE rollout_id = OLD.rollout_id AND evidence = 1);
END;
