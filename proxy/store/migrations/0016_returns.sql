-- The return of each rollout (proxy/returns.py): `reward` is now that, and not only the newest reward of this name.
ALTER TABLE rollouts ADD COLUMN own_reward REAL;     -- weighted; NULL: it has none of its own
ALTER TABLE rollouts ADD COLUMN calls_reward TEXT;   -- the exact sum of its calls' weighted rewards: a fraction

-- By which rules returns are counted. One row.
CREATE TABLE returns (
    n        INTEGER PRIMARY KEY CHECK (n = 1),
    weights  TEXT NOT NULL,                          -- JSON: the weight of each reward by its name
    failed   REAL,                                   -- the reward of a failed rollout that has none of its own
    stale_to INTEGER NOT NULL                        -- rollouts up to this n are still to be counted by these rules
);
INSERT INTO returns SELECT 1, '{"reward":1.0}', NULL, COALESCE(MAX(n), 0) FROM rollouts;

-- A reward that counts marks its rollout at once: nobody looks for unmarked ones.
DROP INDEX rollouts_unrewarded;
