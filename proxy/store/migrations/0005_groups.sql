-- The group in which a step compared a rollout: the n of its first member; NULL while no step has. A sibling that was
-- still running then has it, too, and is compared with the whole group when it ends.
ALTER TABLE rollouts ADD COLUMN group_id INTEGER;
UPDATE rollouts SET group_id = (
    SELECT MIN(taken.n) FROM rollouts AS taken WHERE taken.step = rollouts.step AND taken.task_id = rollouts.task_id
) WHERE step IS NOT NULL AND task_id IS NOT NULL;
CREATE INDEX rollouts_by_group ON rollouts (group_id) WHERE group_id IS NOT NULL;

DROP INDEX rollouts_claimable;
CREATE INDEX rollouts_claimable
    ON rollouts (mode, task_id, group_id, ended_at, status, rewarded_at, step, dropped, calls, foreign_calls)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND task_id IS NOT NULL;
