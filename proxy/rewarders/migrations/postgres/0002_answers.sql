-- The schema of ../sqlite/0002_answers.sql, which says what the columns mean.
CREATE TABLE rewarder_answers (
    digest TEXT NOT NULL,
    n      BIGINT NOT NULL REFERENCES rollouts (n) ON DELETE CASCADE,
    answer TEXT NOT NULL,
    PRIMARY KEY (digest, n)
);
CREATE INDEX rewarder_answers_by_rollout ON rewarder_answers (n);
CREATE FUNCTION rewarder_answers_go() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    DELETE FROM rewarder_answers WHERE digest = OLD.digest;
    RETURN NULL;
END $$;
CREATE TRIGGER rewarder_answers_go AFTER DELETE ON rewarder_answers
    FOR EACH ROW EXECUTE FUNCTION rewarder_answers_go();

CREATE TABLE rewarder_spent (
    rewarder TEXT PRIMARY KEY,
    tokens   BIGINT NOT NULL,
    usd      DOUBLE PRECISION NOT NULL
);

CREATE TABLE rewarder_checks (
    source TEXT PRIMARY KEY,
    at     DOUBLE PRECISION NOT NULL,
    labels BIGINT NOT NULL,
    alike  DOUBLE PRECISION NOT NULL,
    low    DOUBLE PRECISION NOT NULL,
    high   DOUBLE PRECISION NOT NULL
);
