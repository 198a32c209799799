"""The Grafana dashboards as code: plain values, from which `grafana.py` makes Grafana's JSON."""
