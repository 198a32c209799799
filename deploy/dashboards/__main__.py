"""`python -m deploy.dashboards` writes the dashboards to deploy/grafana/dashboards (`make dashboards`)."""

from pathlib import Path

from deploy.dashboards import fleet, latency, router, worker
from deploy.dashboards.grafana import to_json

ALL = (fleet.DASHBOARD, worker.DASHBOARD, router.DASHBOARD, latency.DASHBOARD)
FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"

if __name__ == "__main__":
    for dashboard in ALL:
        (FOLDER / f"{dashboard.name}.json").write_text(to_json(dashboard))
