-- What PostgreSQL needs in addition to `schema.sql`.

ALTER TABLE rollouts SET (fillfactor = 70);

-- What happened has a number only once it is moved from `feed_in`, by one transaction at a time: a lower number never
-- becomes visible after a higher one, so a cursor misses nothing.
CREATE TABLE feed_in (
    n    BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind TEXT NOT NULL,
    ref  TEXT NOT NULL
);
CREATE FUNCTION feed_newest() RETURNS BIGINT LANGUAGE plpgsql AS $$ BEGIN
    IF current_setting('transaction_read_only') = 'off' AND EXISTS (SELECT 1 FROM feed_in)
            AND pg_try_advisory_xact_lock(hashtextextended(current_schema() || ':feed', 0)) THEN
        WITH moved AS (DELETE FROM feed_in RETURNING n, kind, ref)
        INSERT INTO feed (kind, ref) SELECT kind, ref FROM moved ORDER BY n;
        DELETE FROM feed WHERE n <= (SELECT MAX(n) FROM feed) - 10000;
    END IF;
    RETURN (SELECT MAX(n) FROM feed);
END $$;

CREATE INDEX tool_calls_by_id ON tool_calls (rollout_id); -- an id may be longer than an index takes
CREATE INDEX rollout_keys_by_key ON rollout_keys (key_id) WHERE key_id IS NOT NULL;
-- Each update of an indexed column writes to all indexes: these have fewer columns than SQLite's.
CREATE INDEX rollouts_running ON rollouts (created_at, policy_version) WHERE status = 'running';
CREATE INDEX rollouts_by_version ON rollouts (policy_version, mode, task_id)
    WHERE COALESCE(reward, trusted_reward) IS NOT NULL;
CREATE INDEX rollouts_claimable ON rollouts (task_id, group_id, ended_at)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL;
CREATE INDEX rollouts_lone ON rollouts (ended_at)
    WHERE task_id IS NULL AND mode = 'train' AND step IS NULL AND dropped IS NULL AND status <> 'running'
    AND (rewarded_at IS NOT NULL OR status = 'failed');
