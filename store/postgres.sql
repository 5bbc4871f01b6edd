-- What PostgreSQL has beside `schema.sql`. What many transactions would wait for at once is kept as changes that are
-- summed up: `rollout_count_changes`, `feed_in`.

ALTER TABLE rollouts SET (fillfactor = 70);

CREATE TABLE rollout_count_changes (
    mode     TEXT NOT NULL,
    status   TEXT NOT NULL,
    rollouts BIGINT NOT NULL
);
CREATE VIEW rollout_counts AS
    SELECT mode, status, SUM(rollouts)::BIGINT AS rollouts FROM rollout_count_changes GROUP BY mode, status;
CREATE FUNCTION rollout_counted() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP <> 'INSERT' THEN INSERT INTO rollout_count_changes VALUES (OLD.mode, OLD.status, -1); END IF;
    IF TG_OP <> 'DELETE' THEN INSERT INTO rollout_count_changes VALUES (NEW.mode, NEW.status, 1); END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER rollout_opened_or_deleted AFTER INSERT OR DELETE ON rollouts
    FOR EACH ROW EXECUTE FUNCTION rollout_counted();
CREATE TRIGGER rollout_changed AFTER UPDATE OF mode, status ON rollouts
    FOR EACH ROW WHEN (OLD.mode <> NEW.mode OR OLD.status <> NEW.status) EXECUTE FUNCTION rollout_counted();

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

-- Who waits for what is seldom written is told of it, by the transaction that writes it (`store/postgres/database.py`).
CREATE FUNCTION tell() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_notify('lightning_store', TG_TABLE_SCHEMA || '.' || TG_ARGV[0]);
    RETURN NULL;
END $$;
CREATE TRIGGER tell_of_keys AFTER INSERT OR UPDATE OR DELETE ON keys
    FOR EACH STATEMENT EXECUTE FUNCTION tell('keys');
CREATE TRIGGER tell_of_rewards AFTER INSERT ON rewards FOR EACH STATEMENT EXECUTE FUNCTION tell('rewards');
CREATE TRIGGER tell_of_ends AFTER UPDATE OF status ON rollouts FOR EACH STATEMENT EXECUTE FUNCTION tell('rewards');
CREATE TRIGGER tell_of_live AFTER INSERT ON policy_log FOR EACH STATEMENT EXECUTE FUNCTION tell('live');
CREATE TRIGGER tell_of_steps AFTER INSERT OR UPDATE OF metrics ON steps
    FOR EACH STATEMENT EXECUTE FUNCTION tell('steps');

CREATE INDEX tool_calls_by_id ON tool_calls (rollout_id); -- an id may be longer than an index takes
CREATE INDEX rollout_keys_by_key ON rollout_keys (key_id) WHERE key_id IS NOT NULL;
-- Each update of an indexed column writes to all indexes: these have fewer columns than SQLite's.
CREATE INDEX rollouts_running ON rollouts (created_at, policy_version) WHERE status = 'running';
CREATE INDEX rollouts_by_version ON rollouts (policy_version, mode, task_id) WHERE reward IS NOT NULL;
CREATE INDEX rollouts_claimable ON rollouts (task_id, group_id, ended_at)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL;
CREATE INDEX rollouts_lone ON rollouts (ended_at)
    WHERE task_id IS NULL AND mode = 'train' AND step IS NULL AND dropped IS NULL AND status <> 'running'
    AND (rewarded_at IS NOT NULL OR status = 'failed');

-- LZ4 in the place of PostgreSQL's own compression: as small, at a third of the work. A server that was built without
-- it, or is older than 14, keeps its own.
DO $$ DECLARE found RECORD; BEGIN
    FOR found IN
        SELECT attrelid::regclass AS place, attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
        WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace AND attnum > 0 AND attstorage = 'x'
          AND NOT attisdropped
    LOOP
        EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET COMPRESSION lz4', found.place, found.attname);
    END LOOP;
EXCEPTION WHEN feature_not_supported OR syntax_error THEN
    NULL;
END $$;
