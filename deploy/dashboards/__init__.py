"""The Grafana dashboards, as code: what each shows is plain values, and one file makes Grafana's JSON of them."""
