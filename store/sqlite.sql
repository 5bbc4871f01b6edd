-- What SQLite needs in addition to `schema.sql`.

CREATE TRIGGER feed_kept AFTER INSERT ON feed BEGIN
    DELETE FROM feed WHERE n <= NEW.n - 10000;
END;

-- What is asked often is read off an index alone.
CREATE INDEX tool_calls_by_id ON tool_calls (rollout_id, tool_call_id);
CREATE INDEX rollouts_by_mode ON rollouts (mode, n);
-- Rollouts that nobody ends stay running; the versions that recent ones began with are asked for every second.
CREATE INDEX rollouts_running ON rollouts (status, created_at, policy_version) WHERE status = 'running';
CREATE INDEX rollouts_by_version ON rollouts (policy_version, mode, task_id, trusted_reward, reward, foreign_calls)
    WHERE COALESCE(reward, trusted_reward) IS NOT NULL AND foreign_calls = 0;
-- The trainer looks at all that waits, many times a minute. Without its first column, which is the same everywhere,
-- SQLite takes another index.
CREATE INDEX rollouts_claimable
    ON rollouts (mode, task_id, group_id, ended_at, status, rewarded_at, step, dropped, calls, foreign_calls)
    WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND task_id IS NOT NULL;
CREATE INDEX rollouts_lone ON rollouts (mode, task_id, ended_at)
    WHERE task_id IS NULL AND mode = 'train' AND step IS NULL AND dropped IS NULL AND status <> 'running'
    AND (rewarded_at IS NOT NULL OR status = 'failed');
