import pytest

from lightning_proxy.proxy.errors import InvalidRequest
from lightning_proxy.proxy.gateway.relay import DataPath, name_rollout, parse_path
from lightning_proxy.proxy.types import RolloutName

PLAIN = DataPath("/v1/chat/completions")
IN_URL = DataPath("/v1/chat/completions", "from-url", "url-task", "url-agent")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/models", DataPath("/v1/models")),
        ("/rollouts/r/v1/models", DataPath("/v1/models", "r")),
        ("/rollouts/r/tasks/t/v1/x/y", DataPath("/v1/x/y", "r", "t")),
        ("/rollouts/r/agents/a/v1/x", DataPath("/v1/x", "r", None, "a")),
        ("/rollouts/r/tasks/t/agents/a/v1/x", DataPath("/v1/x", "r", "t", "a")),
    ],
)
def test_data_paths_are_split(path, expected):
    assert parse_path(path) == expected


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/rollouts",
        "/rollouts/r",
        "/rollouts/r/transitions",
        "/rollouts/r/end",
        "/rollouts/a/b/v1/models",
        "//v1/models",
        "/reward",
        "/rollouts/r/agents/a/tasks/t/v1/x",
        "/pause",
        "/v2/models",
    ],
)
def test_other_paths_are_not_data_paths(path):
    assert parse_path(path) is None


def test_a_header_wins_over_url_and_key():
    name = name_rollout(IN_URL, {"x-rollout-id": "from-header", "x-task-id": "t"}, "from-key")
    assert name == RolloutName("from-header", "t", None)


def test_a_url_wins_over_a_key_and_headers_fill_in():
    assert name_rollout(IN_URL, {"x-task-id": "t"}, "from-key") == RolloutName("from-url", "url-task", "url-agent")
    name = name_rollout(DataPath("/v1/x", "r"), {"x-task-id": "t", "x-agent-name": "a", "x-rollout-mode": "eval"})
    assert name == RolloutName("r", "t", "a", "eval")


def test_a_key_names_the_rollout_when_nothing_else_does():
    assert name_rollout(PLAIN, {}, "from-key").rollout_id == "from-key"


def test_unnamed_requests_open_a_new_rollout_each():
    assert name_rollout(PLAIN, {}).rollout_id != name_rollout(PLAIN, {}).rollout_id


@pytest.mark.parametrize("value", ["", "a b", "a/b", "é", "x" * 201, "a\n", "'; --"])
@pytest.mark.parametrize("header", ["x-rollout-id", "x-task-id", "x-agent-name"])
def test_invalid_ids_in_headers_are_refused(header, value):
    with pytest.raises(InvalidRequest):
        name_rollout(PLAIN, {header: value})


@pytest.mark.parametrize("part", ["rollout_id", "task_id", "agent"])
def test_invalid_ids_in_urls_are_refused(part):
    with pytest.raises(InvalidRequest):
        name_rollout(DataPath("/v1/x", **{"rollout_id": "r", part: "a b"}), {})


@pytest.mark.parametrize("mode", ["", "test", "EVAL"])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(InvalidRequest, match="train or eval"):
        name_rollout(PLAIN, {"x-rollout-mode": mode})
