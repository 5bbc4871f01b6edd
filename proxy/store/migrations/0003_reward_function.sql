-- The reward function that the proxy was started with (`rewards.function`); no row if there is none.
CREATE TABLE reward_function (
    function TEXT PRIMARY KEY
) WITHOUT ROWID;

-- Completed rollouts for which the reward function is still to be asked. No training step takes them.
CREATE TABLE awaiting_rewards (
    n INTEGER PRIMARY KEY REFERENCES rollouts (n) ON DELETE CASCADE
);
CREATE TRIGGER rollout_awaits_reward AFTER UPDATE OF status ON rollouts
WHEN OLD.status = 'running' AND NEW.status = 'completed' AND EXISTS (SELECT 1 FROM reward_function) BEGIN
    INSERT INTO awaiting_rewards VALUES (NEW.n);
END;
