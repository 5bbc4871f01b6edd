-- Whether any call is under way: few are at a time, however many there were.
CREATE INDEX calls_under_way ON calls (started_at) WHERE status = 'incomplete';
