"""Prometheus itself reads the scrape file, the alerts and the dashboard's expressions, and plays the alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from lightning_proxy.trainer.report.metric_schema import METRICS
from support.paths import ROOT
from support.served import proxy_in_front

DEPLOY, PLAYED = ROOT / "deploy", ROOT / "tests" / "alerts.yaml"
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
PANELS = [panel for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"] if "targets" in panel]
SHOWN = [target["expr"] for panel in PANELS for target in panel["targets"]]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool (Debian's prometheus) on PATH"
)


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_takes_the_scrape_file_and_the_alerts_that_it_names() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "config", "--lint-fatal", DEPLOY / "prometheus.yml")


@needs_promtool
def test_every_alert_fires_when_it_should_and_is_quiet_else() -> None:
    promtool("test", "rules", PLAYED)


def test_every_alert_is_played_firing_and_quiet() -> None:
    played = [one for test in yaml.safe_load(PLAYED.read_text())["tests"] for one in test["alert_rule_test"]]
    names = {rule["alert"] for rule in RULES}
    assert {one["alertname"] for one in played if "exp_alerts" in one} == names
    assert {one["alertname"] for one in played if "exp_alerts" not in one} == names


@needs_promtool
def test_prometheus_understands_what_the_dashboard_asks(tmp_path: Path) -> None:
    asked = [expression.replace("$__rate_interval", "1m").replace("$job", ".*") for expression in SHOWN]
    rules = [{"record": f"shown:{n}", "expr": expression} for n, expression in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": rules}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", tmp_path / "rules.yml")


async def test_the_alerts_and_the_dashboard_name_metrics_and_labels_that_are_there(tmp_path: Path) -> None:
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        await proxy.start()
        async with session.get(proxy.url + "/metrics") as answer:
            families = list(text_string_to_metric_families(await answer.text()))
    there = {sample.name for family in families for sample in family.samples} | {family.name for family in families}
    there |= {f"{family.name}_total" for family in families if family.type == "counter"}
    there |= {f"{family.name}_bucket" for family in families if family.type == "histogram"}
    for expressions in (SHOWN, [rule["expr"] for rule in RULES]):
        used = {name for expression in expressions for name in re.findall(r"\blightning_\w+", expression)}
        assert len(used) > 8 and used - there == set()
        shown = {name for expression in expressions for name in re.findall(r'metric="(\w+)"', expression)}
        assert shown - set(METRICS) == {"step"}
