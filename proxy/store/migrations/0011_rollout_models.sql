-- What answers the alias in rollouts that were opened for another model than the policy.
CREATE TABLE rollout_models (
    rollout_id TEXT PRIMARY KEY REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
    model      TEXT NOT NULL
) WITHOUT ROWID;
