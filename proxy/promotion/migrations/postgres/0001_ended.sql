-- The trigger of ../sqlite/0001_ended.sql.
CREATE FUNCTION test_of_policy_ended() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    UPDATE promotions SET status = 'ended', decided_at = NEW.at,
        reason = 'version ' || NEW.version || ' was made live during the test'
    WHERE status = 'testing';
    RETURN NULL;
END $$;
CREATE TRIGGER test_of_policy_ended AFTER INSERT ON policy_log FOR EACH ROW EXECUTE FUNCTION test_of_policy_ended();
