-- How the newest step that took a call's rollout trained it: one small row for each call of a trained agent.
CREATE TABLE call_credit (
    n         INTEGER NOT NULL REFERENCES rollouts (n) ON DELETE CASCADE,
    seq       INTEGER NOT NULL,                   -- of the call
    step      INTEGER NOT NULL,
    "return"  REAL NOT NULL,
    advantage REAL NOT NULL,
    "row"     INTEGER,                            -- of the rollout's training rows, from 0; NULL: in none
    placed    TEXT NOT NULL,                      -- why it opened, joined or is in no row
    PRIMARY KEY (n, seq)
) WITHOUT ROWID;
