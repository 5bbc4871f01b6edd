-- Whoever makes a version live decides about the one that is tested. A test that made it live is decided already.
CREATE TRIGGER test_of_policy_ended AFTER INSERT ON policy_log BEGIN
    UPDATE promotions SET status = 'ended', decided_at = NEW.at,
        reason = 'version ' || NEW.version || ' was made live during the test'
    WHERE status = 'testing';
END;
