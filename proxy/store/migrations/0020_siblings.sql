-- The first (n) of at least two rollouts of a task that were opened together: they are a group. NULL: opened alone.
ALTER TABLE rollouts ADD COLUMN opened_with INTEGER;
-- Until now nothing but the moment told: it is the same, to the microsecond, for those that were opened together.
UPDATE rollouts SET opened_with = together.first
FROM (
    SELECT task_id, created_at, MIN(n) AS first FROM rollouts
    WHERE mode = 'train' AND step IS NULL AND dropped IS NULL AND group_id IS NULL AND task_id IS NOT NULL
    GROUP BY task_id, created_at HAVING COUNT(*) > 1
) AS together
WHERE rollouts.task_id = together.task_id AND rollouts.created_at = together.created_at
    AND mode = 'train' AND step IS NULL AND dropped IS NULL AND group_id IS NULL;
CREATE INDEX rollouts_opened_together ON rollouts (opened_with) WHERE opened_with IS NOT NULL;
-- Rollouts that were opened one by one: those that a group may be made of, and those that may still belong to it.
CREATE INDEX rollouts_live ON rollouts (task_id, n)
    WHERE mode = 'train' AND step IS NULL AND dropped IS NULL AND status <> 'running'
    AND group_id IS NULL AND opened_with IS NULL AND (rewarded_at IS NOT NULL OR status <> 'completed')
    AND (foreign_calls = 0 OR foreign_calls < calls);
CREATE INDEX rollouts_running_of_task ON rollouts (task_id, n) WHERE status = 'running' AND task_id IS NOT NULL;
DROP INDEX rollouts_lone;
CREATE INDEX rollouts_lone ON rollouts (mode, task_id, ended_at)
    WHERE task_id IS NULL AND mode = 'train' AND step IS NULL AND dropped IS NULL AND status <> 'running'
    AND (rewarded_at IS NOT NULL OR status = 'failed');

-- A group may have become ready, or other than it was: the trainer looks at those alone. `ref`: rollouts.n.
CREATE TRIGGER feed_of_groups AFTER UPDATE OF status, mode, task_id, rewarded_at, step, dropped ON rollouts
WHEN (NEW.status <> 'running' OR NEW.mode <> OLD.mode) AND (
    NEW.status <> OLD.status OR NEW.mode <> OLD.mode OR NEW.task_id IS NOT OLD.task_id
    OR NEW.rewarded_at IS NOT OLD.rewarded_at OR NEW.step IS NOT OLD.step OR NEW.dropped IS NOT OLD.dropped
) BEGIN
    INSERT INTO feed (kind, ref) VALUES ('group', NEW.n);
END;
CREATE TRIGGER feed_of_scored AFTER DELETE ON awaiting_rewards BEGIN
    INSERT INTO feed (kind, ref) VALUES ('group', OLD.n);
END;

-- Returns are counted of rewards within `rewards.range`: larger ones count as the nearer end.
ALTER TABLE returns ADD COLUMN low REAL NOT NULL DEFAULT -10000;
ALTER TABLE returns ADD COLUMN high REAL NOT NULL DEFAULT 10000;
