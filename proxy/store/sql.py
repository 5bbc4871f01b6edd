"""Every SQL statement of the project, with named parameters, in the SQL that SQLite and PostgreSQL share.

Rows of `calls` are written twice: by `CALL_START` when the request goes upstream, as `incomplete`, and by `CALL_END`.
SQLite writes a changed row anew, all of it: a request that is large is in a table of its own.
"""

# Rollouts ---------------------------------------------------------------------------------------------------------

ROLLOUT_SEEN = """
INSERT INTO rollouts (rollout_id, task_id, agent, mode, policy_version, created_at)
VALUES (:rollout_id, :task_id, :agent, :mode, :pin, :at)
ON CONFLICT (rollout_id) DO UPDATE SET
    task_id = COALESCE(rollouts.task_id, excluded.task_id),
    agent = COALESCE(rollouts.agent, excluded.agent),
    mode = CASE WHEN excluded.mode = 'eval' THEN 'eval' ELSE rollouts.mode END,
    policy_version = COALESCE(rollouts.policy_version, excluded.policy_version)
"""
ROLLOUT_OPEN = """
INSERT INTO rollouts (rollout_id, task_id, mode, policy_version, metadata, created_at)
VALUES (:rollout_id, :task_id, :mode, :policy_version, :metadata, :at)
"""
ROLLOUT_CHOOSES = "INSERT INTO rollout_models (rollout_id, model) VALUES (:rollout_id, :model)"
ROLLOUT_CHOSE = "SELECT model FROM rollout_models WHERE rollout_id = :rollout_id"
ROLLOUT_KEY = """
INSERT INTO rollout_keys (key_hash, rollout_id, key_id) VALUES (:key_hash, :rollout_id, :key_id)
"""
ROLLOUT_OF_KEY = "SELECT rollout_id, key_id FROM rollout_keys WHERE key_hash = :key_hash"
ROLLOUT = "SELECT * FROM rollouts WHERE rollout_id = :rollout_id"
ROLLOUTS_PAGE = """
SELECT rollouts.* FROM rollouts
WHERE rollouts.n < :cursor {filters}
ORDER BY rollouts.n DESC LIMIT :limit
"""
ROLLOUTS_PAGE_OF_AGENT = """
SELECT rollouts.* FROM rollout_agents CROSS JOIN rollouts ON rollouts.n = rollout_agents.n
WHERE rollout_agents.agent = :agent AND rollout_agents.n < :cursor {filters}
ORDER BY rollout_agents.n DESC LIMIT :limit
"""
ROLLOUT_FILTERS = {
    "status": "AND status = :status",
    "task_id": "AND task_id = :task_id",
    "mode": "AND mode = :mode",
    "agent": "",  # ROLLOUTS_PAGE_OF_AGENT
}
ROLLOUT_END = """
UPDATE rollouts SET status = :status, reason = :reason, ended_at = :at
WHERE rollout_id = :rollout_id AND status = 'running'
"""
ROLLOUT_DELETE = """
DELETE FROM rollouts WHERE rollout_id = :rollout_id AND status <> 'running'
   AND NOT EXISTS (SELECT 1 FROM steps WHERE steps.step = rollouts.step AND steps.status = 'claimed')
"""
ROLLOUT_COUNTS = "SELECT mode, status, rollouts FROM rollout_counts"

# Calls ------------------------------------------------------------------------------------------------------------

# Refused (`request` would be NULL) when the parent that it is stored against is gone.
CALL_START = """
INSERT INTO calls
    (call_id, rollout_id, seq, parent_id, agent, endpoint, status, upstream, model, policy_version, request, started_at)
VALUES (
    :call_id, :rollout_id, (SELECT COALESCE(MAX(seq) + 1, 0) FROM calls WHERE rollout_id = :rollout_id),
    :parent_id, :agent, :endpoint, 'incomplete', :upstream, :model, :policy_version,
    CASE WHEN :parent_id IS NULL OR EXISTS (SELECT 1 FROM calls WHERE call_id = :parent_id) THEN :request END, :at
)
"""
CALL_LARGE_REQUEST = "INSERT INTO large_requests (call_id, request) VALUES (:call_id, :large_request)"
CALL_END = """
UPDATE calls SET
    status = :status, http_status = :http_status, response = :response,
    upstream = COALESCE(:fallback, upstream),
    model = CASE WHEN :fallback IS NULL THEN model ELSE :model END,
    policy_version = CASE WHEN :fallback IS NULL THEN policy_version END,
    policy_version_end = CASE WHEN policy_version IS NULL OR :fallback IS NOT NULL OR NOT :merged THEN NULL
                              ELSE (SELECT version FROM policy_log ORDER BY n DESC LIMIT 1) END,
    prompt_shared = :prompt_shared, prompt_ids = :prompt_ids, token_ids = :token_ids, logprobs = :logprobs,
    finish_reason = :finish_reason, more_choices = :more_choices, usage = :usage, error = :error,
    untrainable_reason = :untrainable_reason, ttft_ms = :ttft_ms, latency_ms = :latency_ms
WHERE call_id = :call_id
"""
ROLLOUT_CALL_ENDED = """
UPDATE rollouts SET
    calls = calls + 1, tokens = tokens + :tokens,
    foreign_calls = foreign_calls
        + (SELECT CASE WHEN policy_version IS NULL THEN 1 ELSE 0 END FROM calls WHERE call_id = :call_id)
WHERE rollout_id = :rollout_id AND EXISTS (SELECT 1 FROM calls WHERE call_id = :call_id)
"""
CALL_SUPERSEDED = "UPDATE calls SET superseded_by = :call_id WHERE call_id = :earlier"
CALLS = """
SELECT calls.*, large_requests.request AS large_request FROM calls LEFT JOIN large_requests USING (call_id)
WHERE rollout_id = :rollout_id ORDER BY seq
"""
# Of another rollout's there is nothing to be done.
CALL_STATUS = """
SELECT CASE WHEN rollout_id = :rollout_id THEN status ELSE 'ok' END AS status FROM calls WHERE call_id = :call_id
"""
RESPONSES_WITH = "SELECT response, upstream FROM calls WHERE rollout_id = :rollout_id AND response LIKE :pattern"
CALL_EXISTS = "SELECT 1 FROM calls WHERE call_id = :call_id AND rollout_id = :rollout_id"
# Of a call that is still there: its rollout may have been deleted meanwhile.
TOOL_CALL = """
INSERT INTO tool_calls (rollout_id, call_id, position, tool_call_id, name, arguments)
SELECT rollout_id, call_id, :position, :tool_call_id, :name, :arguments FROM calls WHERE call_id = :call_id
"""
TOOL_RESULT = """
UPDATE tool_calls SET result = :result, is_error = :is_error
WHERE result IS NULL AND tool_call_id = :tool_call_id AND call_id = (
    SELECT calls.call_id FROM tool_calls AS same JOIN calls ON calls.call_id = same.call_id
    WHERE same.rollout_id = :rollout_id AND same.tool_call_id = :tool_call_id ORDER BY calls.seq DESC LIMIT 1
)
"""
# By the order of insertion: an index on the time would have to be kept up at every call.
CALL_NEWEST = "SELECT started_at, latency_ms FROM calls WHERE rowid = (SELECT MAX(rowid) FROM calls)"
CALLS_UNDER_WAY = "SELECT COUNT(*) AS n FROM calls WHERE status = 'incomplete' AND started_at > :since"
TOOL_CALLS = "SELECT * FROM tool_calls WHERE rollout_id = :rollout_id ORDER BY call_id, position"

# Rewards ----------------------------------------------------------------------------------------------------------

REWARD = """
INSERT INTO rewards (rollout_id, call_id, name, value, source, comment, final, created_at)
VALUES (:rollout_id, :call_id, :name, :value, :source, :comment, :final, :at)
RETURNING reward_id
"""
REWARDS = "SELECT * FROM rewards WHERE rollout_id = :rollout_id ORDER BY reward_id"
REWARD_NEWEST = "SELECT MAX(reward_id) AS n FROM rewards"
ROLLOUT_REWARD = "UPDATE rollouts SET reward = :value WHERE rollout_id = :rollout_id"
ROLLOUT_REWARDED = "UPDATE rollouts SET rewarded_at = COALESCE(rewarded_at, :at) WHERE rollout_id = :rollout_id"
ROLLOUT_COMPLETE = """
UPDATE rollouts SET status = 'completed', ended_at = :at WHERE rollout_id = :rollout_id AND status = 'running'
"""
# With the siblings that it was compared with: those of its step, or dropped for the same reason.
ROLLOUT_OFFER_AGAIN = """
UPDATE rollouts SET step = NULL, dropped = NULL, dropped_by = NULL
WHERE rollout_id = :rollout_id
   OR (task_id = :task_id AND status <> 'running' AND (step = :step OR dropped = :dropped))
"""
IDEMPOTENT_ANSWER = "SELECT body_hash, answer FROM idempotency WHERE key = :key"
IDEMPOTENT_SAVE = "INSERT INTO idempotency (key, body_hash, answer, created_at) VALUES (:key, :body_hash, :answer, :at)"
IDEMPOTENT_FORGET = """
DELETE FROM idempotency WHERE key IN (SELECT key FROM idempotency WHERE created_at < :before LIMIT :limit)
"""

# Events -----------------------------------------------------------------------------------------------------------

EVENT = """
INSERT INTO events (rollout_id, seq, kind, agent, name, value, arguments, result, is_error, created_at)
VALUES (
    :rollout_id, (SELECT COALESCE(MAX(seq) + 1, 0) FROM calls WHERE rollout_id = :rollout_id),
    :kind, :agent, :name, :value, :arguments, :result, :is_error, :at
)
RETURNING event_id
"""
EVENTS = "SELECT * FROM events WHERE rollout_id = :rollout_id ORDER BY event_id"

# Conversations ----------------------------------------------------------------------------------------------------

CONVERSATION_POINT = """
INSERT INTO conversation_points (digest, rollout_id, at) VALUES (:digest, :rollout_id, :at)
ON CONFLICT (digest) DO UPDATE SET rollout_id = excluded.rollout_id, at = excluded.at
"""
# Said in several rollouts, it tells nothing.
CONVERSATION_ORIGIN = """
INSERT INTO conversation_points (digest, rollout_id, at) VALUES (:digest, :rollout_id, :at)
ON CONFLICT (digest) DO UPDATE SET
    rollout_id = CASE WHEN conversation_points.rollout_id = excluded.rollout_id THEN excluded.rollout_id END,
    at = excluded.at
"""
CONVERSATION_TIP = """
INSERT INTO conversation_tips (digest, at, call_id, rollout_id) VALUES (:digest, :at, :call_id, :rollout_id)
ON CONFLICT (digest, at, call_id) DO NOTHING
"""
CONVERSATION_LEADS_TO = """
SELECT rollouts.rollout_id FROM conversation_points JOIN rollouts USING (rollout_id) WHERE digest = :digest
"""
CONVERSATION_WAITS = "SELECT 1 FROM conversation_tips WHERE digest = :digest LIMIT 1"
# The newest; of requests, rather one that failed than one that may still be answered, and that than one that was.
CONVERSATION_TAKE = """
DELETE FROM conversation_tips WHERE digest = :digest AND (at, call_id) = (
    SELECT recent.at, recent.call_id
    FROM (SELECT at, call_id, rollout_id FROM conversation_tips WHERE digest = :digest ORDER BY at DESC LIMIT 64)
        AS recent
    JOIN rollouts ON rollouts.rollout_id = recent.rollout_id
    LEFT JOIN calls ON calls.call_id = recent.call_id
    ORDER BY CASE calls.status WHEN 'error' THEN 0 WHEN 'cancelled' THEN 0 WHEN 'incomplete' THEN 1 ELSE 2 END,
             recent.at DESC
    LIMIT 1
)
RETURNING rollout_id
"""
CONVERSATION_COUNTS = """
SELECT (SELECT COUNT(*) FROM conversation_points) AS points, (SELECT COUNT(*) FROM conversation_tips) AS tips
"""
POINTS_FORGET = """
DELETE FROM conversation_points WHERE digest IN (
    SELECT digest FROM conversation_points WHERE at < :before ORDER BY at LIMIT :limit
)
"""
TIPS_FORGET = """
DELETE FROM conversation_tips WHERE (digest, at, call_id) IN (
    SELECT digest, at, call_id FROM conversation_tips WHERE at < :before ORDER BY at LIMIT :limit
)
"""
TIPS_OF = "SELECT digest, at, call_id FROM conversation_tips WHERE rollout_id = :rollout_id"
TIP_DELETE = "DELETE FROM conversation_tips WHERE digest = :digest AND at = :at AND call_id = :call_id"
POINTS_OF = "SELECT digest, rollout_id FROM conversation_points WHERE rollout_id = :rollout_id"
POINT_DELETE = "DELETE FROM conversation_points WHERE digest = :digest AND rollout_id = :rollout_id"

# Policy -----------------------------------------------------------------------------------------------------------

LIVE_VERSION = """
SELECT policy_versions.* FROM policy_versions
WHERE version = (SELECT version FROM policy_log ORDER BY n DESC LIMIT 1)
"""
LIVE_SINCE = "SELECT MAX(n) AS n FROM policy_log"
VERSIONS = "SELECT * FROM policy_versions ORDER BY version"
VERSION = "SELECT * FROM policy_versions WHERE version = :version"
VERSION_NEW = """
INSERT INTO policy_versions (version, status, publish, step, created_at, metrics)
SELECT MAX(version) + 1, 'publishing', :publish, :step, :at, :metrics FROM policy_versions
RETURNING version
"""
# A version that rollouts from elsewhere were sampled by; its files are not here.
VERSION_OF_OTHERS = """
INSERT INTO policy_versions (version, status, created_at) VALUES (:version, 'ready', :at) ON CONFLICT DO NOTHING
"""
VERSION_SAVED = """
UPDATE policy_versions SET path = :path, served_model = :served_model, adapters = :adapters WHERE version = :version
"""
VERSION_VERIFIED = "UPDATE policy_versions SET verified = 1 WHERE version = :version"
VERSION_LIVE = "UPDATE policy_versions SET status = 'live', live_at = :at WHERE version = :version"
VERSION_RETIRE = "UPDATE policy_versions SET status = 'ready' WHERE status = 'live' AND version <> :version"
VERSION_FAILED = "UPDATE policy_versions SET status = 'failed', error = :error WHERE version = :version"
STEP_NOT_PUBLISHED = "UPDATE steps SET version = NULL WHERE version = :version"
VERSION_FORGET_UNFINISHED = "DELETE FROM policy_versions WHERE version = :version AND status = 'publishing'"
VERSION_FORGET_PATH = "UPDATE policy_versions SET path = NULL WHERE version = :version"
POLICY_LOG = "INSERT INTO policy_log (version, at) VALUES (:version, :at)"
POLICY_LOG_DURING = """
SELECT version, at FROM policy_log
WHERE at >= (SELECT MIN(started_at) FROM calls WHERE rollout_id = :rollout_id) ORDER BY n
"""
PINNED_VERSIONS = """
SELECT DISTINCT policy_version FROM rollouts
WHERE status = 'running' AND policy_version IS NOT NULL AND created_at > :since
"""

# Training ---------------------------------------------------------------------------------------------------------

# Of an ended rollout. `:failed`: failed ones count for something (`trainer.failed_rollouts`).
_HAS_REWARD = "CASE status WHEN 'completed' THEN rewarded_at IS NOT NULL WHEN 'failed' THEN :failed ELSE FALSE END"
# Not answered by other models than the policy alone: those count nowhere, and are dropped when a step takes their task.
_IS_OWN = "(foreign_calls = 0 OR foreign_calls < calls)"
CLAIMABLE_GROUPS = f"""
SELECT task_id,
       COUNT(*) FILTER (WHERE {_HAS_REWARD}) AS completed,
       COUNT(*) FILTER (WHERE status <> 'completed' OR rewarded_at IS NOT NULL) AS ended,
       MIN(CASE WHEN rewarded_at > ended_at THEN rewarded_at ELSE ended_at END)
           FILTER (WHERE {_HAS_REWARD}) AS oldest
FROM rollouts
WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND task_id IS NOT NULL
  AND {_IS_OWN}
GROUP BY task_id
HAVING COUNT(*) FILTER (WHERE {_HAS_REWARD}) > 0
ORDER BY oldest
"""
CLAIMABLE_OF_TASK = """
SELECT * FROM rollouts
WHERE task_id = :task_id AND mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL
ORDER BY ended_at
"""
# Of the newest rollouts. Not with `=`: SQLite would go through all that have this mode and status.
_ENDED_SINCE_VERSION = """
rollouts.n > (SELECT MAX(n) FROM rollouts) - :newest AND policy_version >= :version
AND mode <> 'eval' AND status NOT IN ('running', 'discarded')
"""
ROLLOUTS_SINCE_VERSION = f"SELECT * FROM rollouts WHERE {_ENDED_SINCE_VERSION} ORDER BY n"
REWARDS_SINCE_VERSION = f"""
SELECT rewards.* FROM rollouts CROSS JOIN rewards ON rewards.rollout_id = rollouts.rollout_id
WHERE {_ENDED_SINCE_VERSION} ORDER BY rollouts.n, rewards.reward_id
"""
# Rollouts without a task: nothing says which others they are siblings of.
CLAIMABLE_LONE = f"""
SELECT COUNT(*) AS completed, MIN(CASE WHEN rewarded_at > ended_at THEN rewarded_at ELSE ended_at END) AS oldest
FROM rollouts
WHERE task_id IS NULL AND mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL
  AND {_HAS_REWARD} AND {_IS_OWN}
"""
LONE = f"""
SELECT * FROM rollouts
WHERE task_id IS NULL AND mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL
  AND {_HAS_REWARD} AND {_IS_OWN}
ORDER BY ended_at LIMIT :limit
"""
EARLIER = f"""
SELECT * FROM rollouts
WHERE n < (SELECT n FROM rollouts WHERE rollout_id = :rollout_id)
  AND mode = 'train' AND {_HAS_REWARD} AND {_IS_OWN}
ORDER BY n DESC LIMIT :limit
"""
# Not with `=`: SQLite would go through the rollouts of all tasks that have this mode and status.
EARLIER_OF_TASK = f"""
SELECT * FROM rollouts
WHERE task_id = :task_id AND n < (SELECT n FROM rollouts WHERE rollout_id = :rollout_id)
  AND mode <> 'eval' AND {_HAS_REWARD} AND {_IS_OWN}
ORDER BY n DESC LIMIT :limit
"""
# A reward of another name than `reward` counts as one by the trainer's configuration only, so the trainer says so.
ROLLOUTS_REWARDED_AS = """
UPDATE rollouts SET rewarded_at = (
    SELECT MIN(created_at) FROM rewards WHERE rewards.rollout_id = rollouts.rollout_id AND rewards.name = :name
)
WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND rewarded_at IS NULL
  AND EXISTS (SELECT 1 FROM rewards WHERE rewards.rollout_id = rollouts.rollout_id AND rewards.name = :name)
"""
CLAIM = "UPDATE rollouts SET step = :step WHERE rollout_id = :rollout_id AND step IS NULL"
CLAIMED = "SELECT * FROM rollouts WHERE step = :step ORDER BY task_id, n"
ANY_CLAIMED = "SELECT 1 FROM rollouts WHERE step IS NOT NULL LIMIT 1"
DROP = "UPDATE rollouts SET dropped = :reason, dropped_by = :step WHERE rollout_id = :rollout_id"
RELEASE = "UPDATE rollouts SET step = NULL WHERE step = :step"
RELEASE_DROPPED = "UPDATE rollouts SET dropped = NULL, dropped_by = NULL WHERE dropped_by = :step"
# A pass over all the data is done: what was trained on is offered again.
OFFER_ALL = "UPDATE rollouts SET step = NULL WHERE step IS NOT NULL"
# Of any version of the schema.
NEWEST_END = "SELECT COALESCE(MAX(ended_at), 0) FROM rollouts"
ENDED_AFTER = "SELECT COUNT(*) FROM rollouts WHERE ended_at > :at"
# A copy of a store knows nothing of the training that was done on the original.
FORGET_TRAINING = (
    "UPDATE rollouts SET step = NULL, dropped = NULL, dropped_by = NULL WHERE step IS NOT NULL OR dropped IS NOT NULL",
    "DELETE FROM steps",
    "UPDATE policy_versions SET step = NULL, path = NULL, status = 'ready' WHERE version > 0",
)
STEP_NEW = """
INSERT INTO steps (step, status, base, created_at)
SELECT COALESCE(MAX(step), 0) + 1, 'claimed', :base, :at FROM steps
RETURNING step
"""
STEP_TRAINED = """
UPDATE steps SET status = 'trained', checkpoint = :checkpoint, metrics = :metrics, finished_at = :at WHERE step = :step
"""
STEP_PUBLISHED = "UPDATE steps SET version = :version WHERE step = :step"
STEP_METRICS = "UPDATE steps SET metrics = :metrics WHERE step = :step"
STEP_FORGET = "DELETE FROM steps WHERE step = :step"
STEP_FORGET_CHECKPOINT = "UPDATE steps SET checkpoint = NULL WHERE step = :step"
STEPS_CLAIMED = "SELECT step FROM steps WHERE status = 'claimed'"
STEP_LAST = "SELECT * FROM steps WHERE status = 'trained' ORDER BY step DESC LIMIT 1"
STEP_OF_VERSION = """
SELECT steps.* FROM policy_versions JOIN steps ON steps.step = policy_versions.step
WHERE policy_versions.version = :version
"""
STEPS = "SELECT * FROM steps WHERE status = 'trained' ORDER BY step"
STEPS_FIRST = """
SELECT * FROM steps WHERE status = 'trained'
    AND json_extract(metrics, '$.method') IS NULL AND NOT json_extract(metrics, '$.skipped')
ORDER BY step LIMIT :limit
"""
STEPS_NEWEST = "SELECT * FROM steps WHERE status = 'trained' ORDER BY step DESC LIMIT :limit"

# Keys -------------------------------------------------------------------------------------------------------------

KEYS = "SELECT * FROM keys ORDER BY created_at, key_id"
KEY_NEW = """
INSERT INTO keys
    (key_id, key_hash, name, role, requests_per_minute, tokens_per_minute, concurrent, recording, created_at)
VALUES (
    :key_id, :key_hash, :name, :role, :requests_per_minute, :tokens_per_minute, :concurrent, :recording, :created_at
)
"""
KEY_REVOKE = "UPDATE keys SET revoked_at = :at WHERE name = :name AND revoked_at IS NULL RETURNING *"
KEYS_PURGE = "DELETE FROM keys WHERE revoked_at IS NOT NULL RETURNING key_id"

# Keeping the store within its limits ------------------------------------------------------------------------------

# Nothing happens in a rollout that ended before :before, has no call under way, and does not belong to a step that is
# being trained or published. One that nobody ended is over when nothing was asked in it since :quiet.
_IS_OVER = """
COALESCE(rollouts.ended_at, rollouts.created_at) < :before
AND (rollouts.status <> 'running' OR rollouts.created_at < :quiet)
AND (step IS NULL OR step NOT IN (SELECT step FROM steps WHERE status = 'claimed' UNION SELECT MAX(step) FROM steps))
AND NOT EXISTS (
    SELECT 1 FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND calls.started_at >= :quiet
    AND (rollouts.status = 'running' OR calls.status = 'incomplete')
)
"""
# `waits`: the trainer may still take it. `:lone`: also without a task (`trainer.lone_rollouts`).
ROLLOUTS_OVER = f"""
SELECT n, created_at, {_IS_OVER} AS is_over,
       mode = 'train' AND (task_id IS NOT NULL OR :lone) AND {_HAS_REWARD} AND {_IS_OWN}
       AND step IS NULL AND dropped IS NULL AS waits
FROM rollouts WHERE n > :after ORDER BY n LIMIT :limit
"""
ROLLOUT_FORGET = f"DELETE FROM rollouts WHERE n = :n AND {_IS_OVER} RETURNING rollout_id"
PAGES = """
SELECT page_size * page_count AS bytes, page_size * freelist_count AS free, auto_vacuum = 2 AS gives_back
FROM pragma_page_size, pragma_page_count, pragma_freelist_count, pragma_auto_vacuum
"""
GIVE_BACK = "PRAGMA incremental_vacuum({pages})"
REWRITE = ("PRAGMA auto_vacuum = INCREMENTAL", "VACUUM")
STORE_TOTALS = """
SELECT (SELECT COUNT(*) FROM calls) AS calls, (SELECT COUNT(*) FROM rewards) AS rewards,
       (SELECT MIN(created_at) FROM rollouts WHERE n = (SELECT MIN(n) FROM rollouts)) AS oldest
"""
