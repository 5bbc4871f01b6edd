-- The training step that was put together when a rollout was dropped: both are given back if it is not finished.
ALTER TABLE rollouts ADD COLUMN dropped_by INTEGER;
CREATE INDEX rollouts_by_dropping ON rollouts (dropped_by) WHERE dropped_by IS NOT NULL;
