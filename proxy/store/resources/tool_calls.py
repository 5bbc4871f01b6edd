"""The statements that record tool calls, and give each result to the call that it answers."""

# Inserts nothing for a call that is gone: its rollout may have been deleted meanwhile.
TOOL_CALL = """
INSERT INTO tool_calls (rollout_id, call_id, position, tool_call_id, name, arguments, place, signs)
SELECT rollout_id, call_id, :position, :tool_call_id, :name, :arguments, :place, :signs
FROM calls WHERE call_id = :call_id
"""
# What a tool call's `signs` holds, digests of so many bytes each, and how much each tells when it is as in the request
# that brings a result (recording/places.py).
SIGN, NO_SIGN = 5, bytes(5)
SIGNS = {"what": 8, "near": 4, "root": 3, "system": 1, "response": 6, "item": 8}
_POINTS = " + ".join(
    f"CASE WHEN substr(same.signs, {1 + SIGN * i}, {SIGN}) = :{name} THEN {points} ELSE 0 END"
    for i, (name, points) in enumerate(SIGNS.items())
)
# Of the calls that stand at this place or have this id, the one that most speaks for. Where one stands there with this
# id, no other is looked at. `least`: points below which it is a call of another conversation. `known`: the result, if
# it may have been brought before. Of equal conversations the first is answered first, else the newest call. A call that
# has its result keeps it.
TOOL_RESULT = f"""
UPDATE tool_calls SET result = :result, is_error = :is_error
WHERE result IS NULL AND (call_id, position) = (
    SELECT call_id, position FROM (
        SELECT same.call_id, same.position, same.result, same.signs,
               CASE WHEN same.place = :place THEN calls.seq ELSE -calls.seq END AS turn,
               CASE WHEN calls.status = 'ok' AND calls.superseded_by IS NULL THEN 1 ELSE 0 END AS is_decision,
               {_POINTS}
               + CASE WHEN same.place = :place THEN 6 ELSE 0 END
               + CASE WHEN same.tool_call_id = :tool_call_id THEN :telling ELSE 0 END
               + CASE WHEN calls.agent = :agent THEN 1 ELSE 0 END AS points
        FROM (
            SELECT call_id, position FROM tool_calls WHERE rollout_id = :rollout_id AND place = :place
            UNION
            SELECT call_id, position FROM tool_calls
            WHERE rollout_id = :rollout_id AND tool_call_id = CASE WHEN NOT EXISTS (
                SELECT 1 FROM tool_calls
                WHERE rollout_id = :rollout_id AND place = :place AND tool_call_id = :tool_call_id
                AND substr(signs, 1, {SIGN}) = :what
            ) THEN :tool_call_id END
        ) AS maybe
        CROSS JOIN tool_calls AS same ON same.call_id = maybe.call_id AND same.position = maybe.position
        CROSS JOIN calls ON calls.call_id = same.call_id
    ) AS found WHERE points >= :least OR signs IS NULL
    ORDER BY points DESC, is_decision DESC, CASE WHEN result = :known THEN 0 WHEN result IS NULL THEN 1 ELSE 2 END,
             turn, position LIMIT 1
)
"""
