-- The schema of ../sqlite/0001_rewarders.sql, which says what the columns mean.
CREATE TABLE rewarder_spoken (
    n        BIGINT NOT NULL REFERENCES awaiting_rewards (n) ON DELETE CASCADE,
    rewarder TEXT NOT NULL,
    PRIMARY KEY (n, rewarder)
);
