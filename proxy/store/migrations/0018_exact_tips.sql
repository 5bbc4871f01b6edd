-- The digest of a conversation with the results of its tools; `digest` is of one where they do not count. NULL: a request.
ALTER TABLE conversation_tips ADD COLUMN exact BLOB;
