-- The schema of ../../migrations/0017_evidence.sql, which says what the columns mean.
ALTER TABLE keys ADD COLUMN evaluator BIGINT NOT NULL DEFAULT 0;
ALTER TABLE rewards ADD COLUMN key_id TEXT;
ALTER TABLE rewards ADD COLUMN evidence BIGINT NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN evidence BIGINT NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN end_counts BIGINT NOT NULL DEFAULT 1;

ALTER TABLE promotion_rollouts ADD COLUMN opened_by TEXT NOT NULL DEFAULT '';
ALTER TABLE promotion_rollouts ADD COLUMN evidence BIGINT NOT NULL DEFAULT 0;
ALTER TABLE prompt_test_rollouts ADD COLUMN opened_by TEXT NOT NULL DEFAULT '';
ALTER TABLE prompt_test_rollouts ADD COLUMN evidence BIGINT NOT NULL DEFAULT 0;
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

CREATE FUNCTION evidence_of_rewards() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    UPDATE promotion_rollouts SET evidence = 1 WHERE rollout_id = NEW.rollout_id AND evidence = 0;
    UPDATE prompt_test_rollouts SET evidence = 1 WHERE rollout_id = NEW.rollout_id AND evidence = 0;
    RETURN NULL;
END $$;
CREATE TRIGGER evidence_of_rewards AFTER INSERT ON rewards
    FOR EACH ROW WHEN (NEW.evidence = 1) EXECUTE FUNCTION evidence_of_rewards();
