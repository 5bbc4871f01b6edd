-- Rollouts without a task that can be trained on, and those that wait for a reward of whatever name.
CREATE INDEX rollouts_lone ON rollouts (mode, task_id, ended_at)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND task_id IS NULL;
CREATE INDEX rollouts_unrewarded ON rollouts (mode, rewarded_at)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND rewarded_at IS NULL;
