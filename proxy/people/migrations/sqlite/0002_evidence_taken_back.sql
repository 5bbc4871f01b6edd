-- What is evidence by its rewards alone is none once they are taken back (0017_evidence.sql of the core).
CREATE TRIGGER evidence_taken_back AFTER DELETE ON rewards
WHEN OLD.evidence = 1 AND NOT EXISTS (SELECT 1 FROM rewards WHERE rollout_id = OLD.rollout_id AND evidence = 1) BEGIN
    UPDATE promotion_rollouts SET evidence = 0 WHERE rollout_id = OLD.rollout_id AND opened_by <> '';
    UPDATE prompt_test_rollouts SET evidence = 0 WHERE rollout_id = OLD.rollout_id AND opened_by <> '';
END;
