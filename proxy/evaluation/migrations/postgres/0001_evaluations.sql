-- The schema of ../sqlite/0001_evaluations.sql, which says what the columns mean.
CREATE TABLE evaluations (
    version         BIGINT PRIMARY KEY,
    step            BIGINT NOT NULL,
    began_at        DOUBLE PRECISION NOT NULL,
    ended_at        DOUBLE PRECISION,
    error           TEXT,
    reward          DOUBLE PRECISION,
    low             DOUBLE PRECISION,
    high            DOUBLE PRECISION,
    difference      DOUBLE PRECISION,
    difference_low  DOUBLE PRECISION,
    difference_high DOUBLE PRECISION,
    tasks           BIGINT,
    rollouts        BIGINT,
    failed          BIGINT,
    by_task         TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX evaluations_by_step ON evaluations (step);

CREATE TABLE best_version (
    n       BIGINT PRIMARY KEY CHECK (n = 1),
    version BIGINT NOT NULL,
    judged  TEXT NOT NULL,
    reward  DOUBLE PRECISION NOT NULL,
    low     DOUBLE PRECISION,
    high    DOUBLE PRECISION
);

CREATE TRIGGER feed_of_evaluations AFTER UPDATE OF ended_at ON evaluations
    FOR EACH ROW EXECUTE FUNCTION feed_of_versions();
