-- The upstream that answered: the one that the call was started for, or a fallback.
ALTER TABLE calls ADD COLUMN upstream TEXT;
