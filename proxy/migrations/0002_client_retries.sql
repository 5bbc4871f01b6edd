-- The call that took this one's place: the client sent the same request again.
ALTER TABLE calls ADD COLUMN superseded_by TEXT;
