-- Whose word counts in the tests of new versions: an admin's key, or one made with `keys create --evaluator`.
ALTER TABLE keys ADD COLUMN evaluator INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rewards ADD COLUMN key_id TEXT;                       -- the key of `keys` that it was posted with
ALTER TABLE rewards ADD COLUMN evidence INTEGER NOT NULL DEFAULT 0; -- 1: that key gave evidence when it was posted
ALTER TABLE rollouts ADD COLUMN evidence INTEGER NOT NULL DEFAULT 0; -- 1: so did the key that opened it
ALTER TABLE rollouts ADD COLUMN end_counts INTEGER NOT NULL DEFAULT 1; -- 0: not so the one that said how it ended

-- `opened_by`: the key that opened the rollout; '': one that gives evidence. Places are counted apart for each.
-- `evidence`: 1 once the rollout is evidence: it was opened by such a key, or has a reward of one.
ALTER TABLE promotion_rollouts ADD COLUMN opened_by TEXT NOT NULL DEFAULT '';
ALTER TABLE promotion_rollouts ADD COLUMN evidence INTEGER NOT NULL DEFAULT 0;
ALTER TABLE prompt_test_rollouts ADD COLUMN opened_by TEXT NOT NULL DEFAULT '';
ALTER TABLE prompt_test_rollouts ADD COLUMN evidence INTEGER NOT NULL DEFAULT 0;
-- Nobody knows any more who posted what was posted before. Where there never was a key, everybody is an admin.
UPDATE promotion_rollouts SET evidence = 1
WHERE promotion IN (SELECT n FROM promotions WHERE status = 'testing') AND NOT EXISTS (SELECT 1 FROM keys);
UPDATE prompt_test_rollouts SET evidence = 1
WHERE test IN (SELECT n FROM prompt_tests WHERE status = 'testing') AND NOT EXISTS (SELECT 1 FROM keys);
UPDATE rewards SET evidence = 1 WHERE rollout_id IN (
    SELECT rollout_id FROM promotion_rollouts WHERE evidence = 1
    UNION SELECT rollout_id FROM prompt_test_rollouts WHERE evidence = 1
);

DROP INDEX promotion_rollouts_by_task;
CREATE INDEX promotion_rollouts_by_task ON promotion_rollouts (promotion, task_id, opened_by, place);
DROP INDEX promotion_rollouts_compared;
CREATE INDEX promotion_rollouts_compared ON promotion_rollouts (promotion) WHERE compared = 1 AND evidence = 1;
DROP INDEX prompt_test_rollouts_by_task;
CREATE INDEX prompt_test_rollouts_by_task ON prompt_test_rollouts (test, task_id, opened_by, place);
DROP INDEX prompt_test_rollouts_compared;
CREATE INDEX prompt_test_rollouts_compared ON prompt_test_rollouts (test, n) WHERE compared = 1 AND evidence = 1;

CREATE TRIGGER evidence_of_rewards AFTER INSERT ON rewards WHEN NEW.evidence = 1 BEGIN
    UPDATE promotion_rollouts SET evidence = 1 WHERE rollout_id = NEW.rollout_id AND evidence = 0;
    UPDATE prompt_test_rollouts SET evidence = 1 WHERE rollout_id = NEW.rollout_id AND evidence = 0;
END;
