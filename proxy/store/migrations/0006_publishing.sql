-- How new weights are published: one row, by the first process that decided it or the last that was told otherwise.
CREATE TABLE publishing (
    n          INTEGER PRIMARY KEY CHECK (n = 1),
    mode       TEXT NOT NULL,                     -- lora, merged
    decided_by TEXT NOT NULL,                     -- trainer, proxy
    at         REAL NOT NULL
);
