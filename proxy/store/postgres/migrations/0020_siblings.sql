-- The schema of ../../migrations/0020_siblings.sql, which says what the columns mean.
ALTER TABLE rollouts ADD COLUMN opened_with BIGINT;
UPDATE rollouts SET opened_with = together.first
FROM (
    SELECT task_id, created_at, MIN(n) AS first FROM rollouts
    WHERE mode = 'train' AND step IS NULL AND dropped IS NULL AND group_id IS NULL AND task_id IS NOT NULL
    GROUP BY task_id, created_at HAVING COUNT(*) > 1
) AS together
WHERE rollouts.task_id = together.task_id AND rollouts.created_at = together.created_at
    AND mode = 'train' AND step IS NULL AND dropped IS NULL AND group_id IS NULL;
CREATE INDEX rollouts_opened_together ON rollouts (opened_with) WHERE opened_with IS NOT NULL;
CREATE INDEX rollouts_live ON rollouts (task_id, n)
    WHERE mode = 'train' AND step IS NULL AND dropped IS NULL AND status <> 'running'
    AND group_id IS NULL AND opened_with IS NULL AND (rewarded_at IS NOT NULL OR status <> 'completed')
    AND (foreign_calls = 0 OR foreign_calls < calls);
CREATE INDEX rollouts_running_of_task ON rollouts (task_id, n) WHERE status = 'running' AND task_id IS NOT NULL;
CREATE INDEX rollouts_lone ON rollouts (ended_at)
    WHERE task_id IS NULL AND mode = 'train' AND step IS NULL AND dropped IS NULL AND status <> 'running'
    AND (rewarded_at IS NOT NULL OR status = 'failed');

CREATE FUNCTION feed_of_groups() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO feed_in (kind, ref) VALUES ('group', NEW.n);
    RETURN NULL;
END $$;
CREATE FUNCTION feed_of_scored() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO feed_in (kind, ref) VALUES ('group', OLD.n);
    RETURN NULL;
END $$;
CREATE TRIGGER feed_of_groups AFTER UPDATE OF status, mode, task_id, rewarded_at, step, dropped ON rollouts
    FOR EACH ROW WHEN ((NEW.status <> 'running' OR NEW.mode <> OLD.mode) AND (
        NEW.status <> OLD.status OR NEW.mode <> OLD.mode OR NEW.task_id IS DISTINCT FROM OLD.task_id
        OR NEW.rewarded_at IS DISTINCT FROM OLD.rewarded_at OR NEW.step IS DISTINCT FROM OLD.step
        OR NEW.dropped IS DISTINCT FROM OLD.dropped
    )) EXECUTE FUNCTION feed_of_groups();
CREATE TRIGGER feed_of_scored AFTER DELETE ON awaiting_rewards FOR EACH ROW EXECUTE FUNCTION feed_of_scored();

ALTER TABLE returns ADD COLUMN low DOUBLE PRECISION NOT NULL DEFAULT -10000;
ALTER TABLE returns ADD COLUMN high DOUBLE PRECISION NOT NULL DEFAULT 10000;
