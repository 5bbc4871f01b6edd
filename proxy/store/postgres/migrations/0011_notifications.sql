-- Who waits for what is seldom written is told of it, by the transaction that writes it (`postgres/listening.py`).

CREATE FUNCTION tell() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_notify('lightning_store', TG_TABLE_SCHEMA || '.' || TG_ARGV[0]);
    RETURN NULL;
END $$;
CREATE TRIGGER tell_of_keys AFTER INSERT OR UPDATE OR DELETE ON keys
    FOR EACH STATEMENT EXECUTE FUNCTION tell('keys');
CREATE TRIGGER tell_of_prompts AFTER INSERT ON prompt_versions FOR EACH STATEMENT EXECUTE FUNCTION tell('prompts');
CREATE TRIGGER tell_of_prompt AFTER INSERT ON prompt_log FOR EACH STATEMENT EXECUTE FUNCTION tell('prompts');
CREATE TRIGGER tell_of_rewards AFTER INSERT ON rewards FOR EACH STATEMENT EXECUTE FUNCTION tell('rewards');
CREATE TRIGGER tell_of_ends AFTER UPDATE OF status ON rollouts FOR EACH STATEMENT EXECUTE FUNCTION tell('rewards');
CREATE TRIGGER tell_of_live AFTER INSERT ON policy_log FOR EACH STATEMENT EXECUTE FUNCTION tell('live');
CREATE TRIGGER tell_of_steps AFTER INSERT OR UPDATE OF metrics ON steps
    FOR EACH STATEMENT EXECUTE FUNCTION tell('steps');
