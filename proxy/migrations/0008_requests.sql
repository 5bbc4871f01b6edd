-- What an agent sent, apart from its call: a call's row is written again when it ends, and once more with a request in
-- it would be most of what is written.
CREATE TABLE requests (
    call_id TEXT PRIMARY KEY REFERENCES calls (call_id) ON DELETE CASCADE,
    request TEXT NOT NULL
);
INSERT INTO requests SELECT call_id, request FROM calls;
ALTER TABLE calls DROP COLUMN request;
