"""Prometheus and Grafana accept the files of deploy/. tests/test_serve_sim.py shows that a real Prometheus finds data
for each panel."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from pdserve.security.credentials import create
from tests.deploy.compose import FOLDER, load
from tests.deploy.dashboard import DASHBOARD, FILE, PANELS, expressions
from tests.deploy.prometheus import promtool
from tests.observe.test_metrics_page import METRICS

UNITS = {"none", "s", "reqps", "percentunit", "Bps", "bytes"}
"""Grafana's units that we use"""
OF_PROMETHEUS = {"le", "job", "instance", "source", "namespace"}
"""labels that are not in the table of docs/metrics.md"""


def test_promtool_accepts_the_configuration_and_its_commented_options(tmp_path: Path) -> None:
    written = (FOLDER / "prometheus.yml").read_text()
    offered = re.sub(r"^( {2,4})# (?=\w+: |- job_name: |  \w+: )", r"\1", written, flags=re.M)
    assert {"scheme", "tls_config", "authorization"} <= yaml.safe_load(offered)["scrape_configs"][0].keys()
    assert yaml.safe_load(offered)["scrape_configs"][1]["job_name"] == "etcd"
    create(tmp_path / "credentials")
    for name in ("ca.pem", "api-key"):
        (tmp_path / name).touch()
    (tmp_path / "alerts.yml").write_text((FOLDER / "alerts.yml").read_text())
    for text in (written, offered):
        (file := tmp_path / "prometheus.yml").write_text(text)
        checked = promtool("check", "config", "--lint=all", "--lint-fatal", str(file))
        assert checked.returncode == 0, checked.stderr


def test_each_alert_fires_when_it_should() -> None:
    file = Path(__file__).with_name("alerts.yml")
    tested = promtool("test", "rules", str(file))
    assert tested.returncode == 0, tested.stdout + tested.stderr
    alerts = {
        rule["alert"] for rule in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    }
    fired = re.findall(r"alertname: (\w+)\n +exp_alerts:", file.read_text())
    assert alerts == set(fired)
    described = (FOLDER / "../docs/alerts.md").read_text()
    assert alerts == set(re.findall(r"^\| `(Pdserve\w+)` \|", described, re.M))
    tried = "".join(path.read_text() for path in file.parent.glob("test_*.py") if path != Path(__file__))
    assert {alert for alert in alerts if f'"{alert}' not in tried} == set(), (
        "fired by no test with a real fault"
    )


# the dashboard


def test_grafanas_schema_has_all_keys_of_the_dashboard() -> None:
    """Grafana's own library, generated from its schema, drops unknown keys and adds defaults."""
    register_default_plugins()  # options of panels and queries too
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert list(_missing(DASHBOARD, known, "")) == []


def _missing(ours: Any, known: Any, at: str) -> list[str]:
    if isinstance(ours, dict) and isinstance(known, dict):
        return [path for key in ours for path in _missing(ours[key], known.get(key), f"{at}/{key}")]
    if isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        return [
            path for index, one in enumerate(ours) for path in _missing(one, known[index], f"{at}/{index}")
        ]
    return [] if ours == known else [at]


def test_panels_have_description_unit_and_source() -> None:
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_panels_and_alerts_ask_for_documented_metrics_and_labels() -> None:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    asked = [*expressions(), *((rule["alert"], rule["expr"]) for rule in rules)]
    assert len(asked) > 30
    for title, expression in asked:
        grouped = {label for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(", ")}
        there = set(OF_PROMETHEUS)
        for name, filters in re.findall(r"\b(pdserve_\w+)(?:\{([^}]*)\})?", expression):
            kind, labels, _ = METRICS[re.sub("_bucket$", "", name)]
            assert name.endswith("_bucket") == (kind == "histogram"), title
            used = set(re.findall(r"(\w+)=", filters))
            assert used <= labels | OF_PROMETHEUS, f"{title}: {name} has no labels {used - labels}"
            there |= labels
        assert grouped <= there or "pdserve_" not in expression, f"{title}: no labels {grouped - there}"


def test_grafana_is_provisioned_with_existing_files() -> None:
    services = load("docker-compose.yml")["services"]
    grafana = services["grafana"]
    mounted, seen, _ = next(volume for volume in grafana["volumes"] if "provisioning" in volume).split(":")
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert FOLDER / mounted / home.relative_to(seen) == FILE
    (provider,) = yaml.safe_load((FILE.parent / "pdserve.yml").read_text())["providers"]
    assert Path(provider["options"]["path"]) == home.parent
    sources = yaml.safe_load((FOLDER / mounted / "datasources/pdserve.yml").read_text())["datasources"]
    assert {source["type"] for source in sources} == {"prometheus", "jaeger"}
    for source in sources:
        assert source["url"].split("$")[1] in grafana["environment"]
    variable = DASHBOARD["templating"]["list"][0]["current"]["value"]
    assert variable in {source["uid"] for source in sources}
    interval = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert sources[0]["jsonData"]["timeInterval"] == interval


def test_monitoring_services_are_on_loopback_and_pinned() -> None:
    watching = {
        n: s for n, s in load("docker-compose.yml")["services"].items() if s.get("profiles") == ["watch"]
    }
    assert set(watching) == {"prometheus", "grafana", "jaeger"}
    for service in watching.values():
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert "127.0.0.1:" in service["healthcheck"]["test"][-1]
    assert "--web.listen-address=127.0.0.1:9090" in watching["prometheus"]["command"]
    assert watching["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
