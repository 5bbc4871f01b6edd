-- What happened, in order, for those who watch. `ref` names the row that says what: the newest 10,000 are kept.
CREATE TABLE feed (
    n    INTEGER PRIMARY KEY,                     -- the cursor of GET /feed
    kind TEXT NOT NULL,                           -- call | reward | rollout | step | version
    ref  NOT NULL                                 -- call_id | reward_id | rollouts.n | step | version
);
CREATE TRIGGER feed_kept AFTER INSERT ON feed BEGIN
    DELETE FROM feed WHERE n <= NEW.n - 10000;
END;
CREATE TRIGGER feed_of_calls AFTER UPDATE OF status ON calls WHEN OLD.status = 'incomplete' BEGIN
    INSERT INTO feed (kind, ref) VALUES ('call', NEW.call_id);
END;
CREATE TRIGGER feed_of_rewards AFTER INSERT ON rewards BEGIN
    INSERT INTO feed (kind, ref) VALUES ('reward', NEW.reward_id);
END;
CREATE TRIGGER feed_of_opened AFTER INSERT ON rollouts BEGIN
    INSERT INTO feed (kind, ref) VALUES ('rollout', NEW.n);
END;
CREATE TRIGGER feed_of_ended AFTER UPDATE OF status ON rollouts WHEN OLD.status <> NEW.status BEGIN
    INSERT INTO feed (kind, ref) VALUES ('rollout', NEW.n);
END;
CREATE TRIGGER feed_of_claimed AFTER INSERT ON steps BEGIN
    INSERT INTO feed (kind, ref) VALUES ('step', NEW.step);
END;
-- A step's metrics come when it is trained, and again when it is published.
CREATE TRIGGER feed_of_steps AFTER UPDATE OF metrics ON steps BEGIN
    INSERT INTO feed (kind, ref) VALUES ('step', NEW.step);
END;
CREATE TRIGGER feed_of_versions AFTER UPDATE OF status, verified ON policy_versions
WHEN OLD.status <> NEW.status OR OLD.verified <> NEW.verified BEGIN
    INSERT INTO feed (kind, ref) VALUES ('version', NEW.version);
END;
CREATE TRIGGER feed_of_live AFTER INSERT ON policy_log BEGIN
    INSERT INTO feed (kind, ref) VALUES ('version', NEW.version);
END;
