-- Large requests, apart from their calls: a call's row is written again when it ends, and with such a request in it, that
-- would be most of what is written. Small ones stay in `calls.request`, which is '' for a request that is here.
CREATE TABLE large_requests (
    call_id TEXT PRIMARY KEY REFERENCES calls (call_id) ON DELETE CASCADE,
    request TEXT NOT NULL
);
