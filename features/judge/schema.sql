-- schema 1
-- Which rewarders (judge.use) have given a rollout what they give; the rollout awaits the others.
CREATE TABLE rewarder_spoken (
    n        INTEGER NOT NULL REFERENCES awaiting_rewards (n) ON DELETE CASCADE,
    rewarder TEXT NOT NULL,
    PRIMARY KEY (n, rewarder)
) WITHOUT ROWID;

-- What models answered: a row for each rollout that a question was about. With one of them all go.
CREATE TABLE rewarder_answers (
    digest TEXT NOT NULL,                         -- of the question
    n      INTEGER NOT NULL REFERENCES rollouts (n) ON DELETE CASCADE,
    answer TEXT NOT NULL,
    PRIMARY KEY (digest, n)
) WITHOUT ROWID;
CREATE INDEX rewarder_answers_by_rollout ON rewarder_answers (n);
CREATE TRIGGER rewarder_answers_go AFTER DELETE ON rewarder_answers BEGIN
    DELETE FROM rewarder_answers WHERE digest = OLD.digest;
END;

-- What each rewarder has used; it stays when rollouts are deleted.
CREATE TABLE rewarder_spent (
    rewarder TEXT PRIMARY KEY,
    tokens   INTEGER NOT NULL,
    usd      REAL NOT NULL
) WITHOUT ROWID;
