-- Which rewarders (rewards.use) have given a rollout what they give; the rollout awaits the others.
CREATE TABLE rewarder_spoken (
    n        INTEGER NOT NULL REFERENCES awaiting_rewards (n) ON DELETE CASCADE,
    rewarder TEXT NOT NULL,
    PRIMARY KEY (n, rewarder)
) WITHOUT ROWID;
