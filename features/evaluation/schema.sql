-- schema 1
-- Evaluations of policy versions on held-out tasks (evaluation). Times are Unix times.
CREATE TABLE evaluations (
    version         INTEGER NOT NULL PRIMARY KEY,
    step            INTEGER NOT NULL,             -- that made the version; 0 for the base model
    began_at        REAL NOT NULL,
    ended_at        REAL,                         -- NULL: it is under way, or its trainer was killed
    error           TEXT,                         -- why it has no result
    reward          REAL,                         -- the mean over tasks, and its 95 % interval
    low             REAL,
    high            REAL,
    difference      REAL,                         -- from the first version that was evaluated, on the same tasks
    difference_low  REAL,
    difference_high REAL
);
CREATE INDEX evaluations_by_step ON evaluations (step);
CREATE INDEX evaluations_under_way ON evaluations (version) WHERE ended_at IS NULL;

CREATE TRIGGER feed_of_evaluations AFTER UPDATE OF ended_at ON evaluations BEGIN
    INSERT INTO feed (kind, ref) VALUES ('version', NEW.version);
END;
