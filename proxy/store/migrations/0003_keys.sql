-- Keys given out by `lightning-proxy keys`; the keys themselves are not kept. A revoked one stays, and lets nobody in.
CREATE TABLE keys (
    key_id              TEXT PRIMARY KEY,
    key_hash            TEXT NOT NULL UNIQUE,         -- SHA-256
    name                TEXT NOT NULL,
    role                TEXT NOT NULL,                -- agent | admin
    requests_per_minute INTEGER,                      -- NULL: as proxy.limits says
    tokens_per_minute   INTEGER,
    concurrent          INTEGER,
    recording           INTEGER NOT NULL DEFAULT 1,
    created_at          REAL NOT NULL,
    revoked_at          REAL
);
CREATE UNIQUE INDEX keys_by_name ON keys (name) WHERE revoked_at IS NULL;

-- The key that a rollout's key was asked for with: its limits count, and it ends both.
ALTER TABLE rollout_keys ADD COLUMN key_id TEXT REFERENCES keys (key_id) ON DELETE CASCADE;
