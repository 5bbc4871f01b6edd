-- The schema of ../../migrations/0016_returns.sql, which says what the columns mean.
ALTER TABLE rollouts ADD COLUMN own_reward DOUBLE PRECISION;
ALTER TABLE rollouts ADD COLUMN calls_reward TEXT;

CREATE TABLE returns (
    n        BIGINT PRIMARY KEY CHECK (n = 1),
    weights  TEXT NOT NULL,
    failed   DOUBLE PRECISION,
    stale_to BIGINT NOT NULL
);
INSERT INTO returns SELECT 1, '{"reward":1.0}', NULL, COALESCE(MAX(n), 0) FROM rollouts;

