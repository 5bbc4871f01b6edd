-- Where a tool call stands in its conversation, by which its result is found: a digest of all that was said before it,
-- and digests of its name and arguments and of what is around it (recording/places.py). NULL: made by an older version.
ALTER TABLE tool_calls ADD COLUMN place BLOB;
ALTER TABLE tool_calls ADD COLUMN signs BLOB;
CREATE INDEX tool_calls_by_place ON tool_calls (rollout_id, place) WHERE place IS NOT NULL;
