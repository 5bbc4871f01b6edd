-- What a policy version answered when it was first asked, and why its server does not seem to serve it now.
CREATE TABLE probes (
    version INTEGER PRIMARY KEY,
    model   TEXT NOT NULL,                        -- the name that the version is served under
    answer  TEXT NOT NULL,                        -- JSON: by position, the sampled token and the most likely ones
    at      REAL NOT NULL,
    problem TEXT                                  -- NULL: it answers as it did
);
