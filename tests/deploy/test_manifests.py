"""The manifests for Kubernetes and Docker are well-formed, and agree with what the processes take."""

import importlib
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.key_broker import PASSWORDS
from tokenbus.auth import broker_config, seeds
from tokenbus.cli import main
from tokenbus.cli.console import catalog, config, nats_server
from tokenbus.protocol.wire import subjects
from tools import alert_rules

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
GUIDE = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
OPERATORS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}
"""Kinds that operators add to Kubernetes, and the modules made from their schemas."""


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if not document["apiVersion"].startswith("kustomize.config.k8s.io/"):
                yield f"{path.relative_to(DEPLOY)} {document.get('kind')}", document


MANIFESTS = [(name, document) for name, document in documents() if document["apiVersion"] not in OPERATORS]


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for _, one in documents() if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pods() -> list[dict[str, Any]]:
    """The pods of our own processes, and of the broker."""
    kinds = ("Deployment", "StatefulSet")
    return [document["spec"]["template"]["spec"] for _, document in MANIFESTS if document["kind"] in kinds]


def built(folder: str) -> list[dict[str, Any]]:
    """Returns the objects that `kubectl apply -k` would apply."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on the PATH")
    words = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("document", [document for _, document in MANIFESTS], ids=[name for name, _ in MANIFESTS])
def test_a_manifest_is_what_kubernetes_takes(document: dict[str, Any]) -> None:
    for version in ("1.27", "1.37"):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.long
def test_an_object_of_an_operator_is_what_its_schema_takes() -> None:
    pytest.importorskip("cloudcoil", reason="the schemas of operators are not installed")
    foreign = [document for _, document in documents() if document["apiVersion"] in OPERATORS]
    assert {document["kind"] for document in foreign} == {"PodMonitor", "PrometheusRule", "ScaledObject"}
    for document in foreign:
        model = getattr(importlib.import_module(OPERATORS[document["apiVersion"]]), document["kind"])
        made = model.model_validate(document).model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert made == document  # what a schema does not have is gone


def test_every_file_that_a_kustomization_names_is_there() -> None:
    for path in KUBERNETES.rglob("kustomization.yaml"):
        for name in yaml.safe_load(path.read_text())["resources"]:
            assert (path.parent / name).exists(), f"{path} names {name}"


@pytest.mark.parametrize("folder", ["nats", "overlays/cpu", "overlays/gpu"])
def test_what_a_folder_applies_is_what_kubernetes_takes_and_the_guide_shows(folder: str) -> None:
    made = built(folder)
    _, _, shown = GUIDE.partition(f"$ kubectl apply -k deploy/kubernetes/{folder}\n")
    lines = re.split(r"^(?:```|\$ )", shown, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    for document in made:
        kubernetes_validate.validate(document, "1.37", strict=True)
    if folder != "overlays/gpu":  # the guide shows the other
        assert sorted(lines) == sorted(applied(document) for document in made)


def applied(document: dict[str, Any]) -> str:
    """Returns what `kubectl apply` prints about a new object."""
    group, _, _ = document["apiVersion"].rpartition("/")
    kind = ".".join(part for part in (document["kind"].lower(), group) if part)
    exists = document["kind"] == "Namespace"  # the guide creates it first, for the Secret
    return f"{kind}/{document['metadata']['name']} {'configured' if exists else 'created'}"


def test_a_broker_of_the_cluster_starts_with_the_permissions_of_its_users(tmp_path: Path) -> None:
    (container,) = find("StatefulSet", "nats")["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: "p1" for one in container["env"]}
    (tmp_path / "nats.conf").write_text(find("ConfigMap", "nats")["data"]["nats.conf"])
    (tmp_path / "permissions.conf").write_text((DEPLOY / "nats.conf").read_text())
    words = [nats_server.find_binary(), "-t", "--config", str(tmp_path / "nats.conf")]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "permissions.conf").write_text(broker_config.broker_config(seeds.create(tmp_path / "seeds")))
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "permissions.conf=deploy/nats.conf" in GUIDE


def test_a_router_may_do_with_keys_what_it_may_without() -> None:
    def subjects_of(config: str) -> set[str]:
        """The subjects of the system that the user `router` of a broker's configuration has."""
        (part,) = re.findall(r"user: router,(.*?)user: ", config, re.DOTALL)
        return set(re.findall(r'"((?:tokenbus\.v1\.|\$JS\.API\.)[^"]+)"', part))

    without = subjects_of((DEPLOY / "nats.conf").read_text())
    assert "tokenbus.v1.routers.*" in without
    beside = subjects_of((DEPLOY.parent / "auth" / "nats-keys.conf").read_text()) - without
    assert without <= subjects_of((DEPLOY.parent / "auth" / "nats-keys.conf").read_text())
    assert all("v1_keys" in one or "STREAM.PURGE" in one for one in beside), beside


def test_every_password_of_a_pod_is_in_the_secret_that_the_guide_creates() -> None:
    used = {
        one["valueFrom"]["secretKeyRef"]["key"]
        for pod in pods()
        for container in pod["containers"]
        for one in container["env"]
        if "secretKeyRef" in one.get("valueFrom", {})
    }
    (names,) = re.findall(r"for user in (.+?); do ", GUIDE)
    assert used == {*names.split(), "api-keys", "auth"}


def test_streams_pass_an_ingress_without_being_collected_or_cut() -> None:
    notes = find("Ingress", "gateway")["metadata"]["annotations"]
    nginx = {name.rpartition("/")[2]: value for name, value in notes.items() if name.startswith("nginx.")}
    assert nginx["proxy-buffering"] == "off"
    assert int(nginx["proxy-read-timeout"]) >= 600
    gateway = catalog.make_parser("gateway")
    assert nginx["proxy-body-size"] == f"{gateway.get_default('max_body_bytes') >> 20}m"


def test_behind_an_ingress_clients_share_no_limit_of_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, copy)
    with (copy / "overlays/cpu/kustomization.yaml").open("a") as overlay:
        overlay.write("components: [../../ingress]\n")
    made = built(str(copy / "overlays/cpu"))
    assert "Ingress" in {document["kind"] for document in made}
    (gateway,) = [one for one in made if (one["kind"], one["metadata"]["name"]) == ("Deployment", "gateway")]
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    for one in container["env"]:
        if "value" in one:
            monkeypatch.setenv(one["name"], one["value"])
    parser = catalog.make_parser("gateway")
    config.apply(parser, "gateway", {}, "")
    assert parser.get_default("max_connections_per_address") == 0


def test_prometheus_sees_the_jobs_that_rules_and_dashboards_are_about() -> None:
    (endpoint,) = find("PodMonitor", "tokenbus")["spec"]["podMetricsEndpoints"]
    job, instance = endpoint["relabelings"]
    assert (job["sourceLabels"], job["targetLabel"]) == (["__meta_kubernetes_pod_label_app"], "job")
    assert (instance["sourceLabels"], instance["targetLabel"]) == (["__meta_kubernetes_pod_name"], "instance")
    deployments = [document for _, document in MANIFESTS if document["kind"] == "Deployment"]
    labels = [document["spec"]["template"]["metadata"]["labels"]["app"] for document in deployments]
    jobs = {job["replacement"].replace("$1", label) for label in labels}
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert jobs == {one["job_name"] for one in scraped}
    for document in deployments:
        (container,) = document["spec"]["template"]["spec"]["containers"]
        assert endpoint["port"] in {port["name"] for port in container["ports"]}


def test_alerts_in_a_cluster_link_to_the_page_that_its_overlay_names(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES / "monitoring", tmp_path / "monitoring")
    pages = tmp_path / "monitoring" / "runbooks.yaml"
    pages.write_text(alert_rules.linked(pages.read_text(), "https://wiki.corp/on-call?page=tokenbus"))
    rule, monitor = sorted(built(str(tmp_path / "monitoring")), key=lambda one: one["kind"], reverse=True)
    assert (rule["kind"], monitor["kind"]) == ("PrometheusRule", "PodMonitor")  # and nothing else is applied
    links = [one["annotations"]["runbook_url"] for one in rule["spec"]["groups"][1]["rules"]]
    assert "https://wiki.corp/on-call?page=tokenbus#no-router" in links
    assert all(link.startswith("https://wiki.corp/on-call?page=tokenbus#") for link in links)


def test_the_settings_of_the_cluster_are_settings_that_processes_know(tmp_path: Path) -> None:
    text = find("ConfigMap", "tokenbus")["data"]["tokenbus.toml"]
    path = tmp_path / "tokenbus.toml"
    path.write_text(text)
    for section in config.SECTIONS:
        config.apply(catalog.make_parser(section), section, config.read(path), str(path))
    assert set(tomllib.loads(text)) == {"nats", *config.SECTIONS}


def test_routers_answer_in_the_inboxes_that_the_gateway_of_the_cluster_asks_for() -> None:
    settings = tomllib.loads(find("ConfigMap", "tokenbus")["data"]["tokenbus.toml"])
    prefixes, gateway = tuple(settings["router"]["inbox-prefix"]), settings["gateway"]
    assert subjects.is_inbox(f"{gateway['nats-inbox']}.x", prefixes, subjects.encode_name(gateway["tenant"]))
    assert subjects.is_inbox(gateway["tenant-inbox"].replace("{tenant}", "acme") + ".x", prefixes, "acme")


def test_containers_run_as_nobody_with_nothing_to_write_to() -> None:
    assert len(pods()) == 5
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert {"readinessProbe", "livenessProbe", "resources"} <= container.keys()


def test_probes_ask_where_no_client_is() -> None:
    for (container,) in (pod["containers"] for pod in pods()):
        asked = {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")}
        assert asked == {"monitor" if container["name"] == "nats" else "metrics"}
    settings = tomllib.loads(find("ConfigMap", "tokenbus")["data"]["tokenbus.toml"])
    for name, section in settings.items():
        assert name == "nats" or section["metrics-port"] == "9100", name


def test_a_pod_has_more_time_to_leave_than_its_streams_to_finish_and_to_be_taken() -> None:
    settings = tomllib.loads(find("ConfigMap", "tokenbus")["data"]["tokenbus.toml"])["worker"]
    worker = find("Deployment", "worker")
    needed_s = settings["grace-s"] + settings["handover-s"]
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > needed_s


def default(text: str) -> str:
    """Returns what compose makes of a variable that is not set."""
    return text.partition(":-")[2].rstrip("}") if text.startswith("${") else text


def test_the_commands_of_the_compose_files_are_ones_that_processes_take() -> None:
    for file, nats in (("compose.yaml", "nats://nats:4222"), ("compose.host.yaml", "nats://127.0.0.1:4222")):
        services = yaml.safe_load((DEPLOY / file).read_text())["services"]
        for name in ("router", "worker", "gateway"):
            command = services[name]["command"]
            words = command if isinstance(command, list) else command.split()
            assert main.parse([default(word) for word in words]).nats == nats


def test_containers_of_a_fleet_with_keys_have_the_users_and_passwords_of_their_broker() -> None:
    services = yaml.safe_load((DEPLOY / "compose.auth.yaml").read_text())["services"]
    assert set(services["nats"]["environment"]) == set(PASSWORDS)
    auth = main.parse(["auth", *services["auth"]["command"].split()[1:], "--nats-user", "auth"])
    assert (auth.nats, auth.seeds) == ("nats://nats:4222", "/callout.seeds")
    for name, allowed in (("router", "_INBOX_router"), ("worker", "_INBOX_worker"), ("gateway", "_INBOX_gateway")):
        given = services[name]["environment"]
        assert (given["TOKENBUS_NATS_USER"], given["TOKENBUS_NATS_INBOX"]) == (name, allowed)
        own = [one for one in given if one.startswith(f"TOKENBUS_{name.upper()}_")]
        flags = catalog.make_parser(name).flags
        assert all(one.removeprefix(f"TOKENBUS_{name.upper()}_").lower().replace("_", "-") in flags for one in own)


def test_a_broker_with_keys_takes_the_command_of_its_container_and_keeps_its_files_on_the_volume(
    tmp_path: Path,
) -> None:
    written = tmp_path / "callout.conf"
    written.write_text(broker_config.broker_config(seeds.create(tmp_path / "seeds")))
    compose = yaml.safe_load((DEPLOY / "compose.auth.yaml").read_text())["services"]["nats"]
    (patch,) = yaml.safe_load((KUBERNETES / "keys" / "kustomization.yaml").read_text())["patches"]
    added = [
        (one["path"].removeprefix("/spec/template/spec/containers/0/"), one["value"])
        for one in yaml.safe_load(patch["patch"])
    ]
    assert dict(added)["workingDir"] == dict(added)["volumeMounts/-"]["mountPath"]
    assert (
        f"nats:{compose['working_dir']}"
        in yaml.safe_load((DEPLOY / "compose.keys.yaml").read_text())["services"]["nats"]["volumes"]
    )
    in_kubernetes = ["--config", "/callout.conf", *(value for path, value in added if path == "command/-")]
    for command in (compose["command"], in_kubernetes):
        words = [nats_server.find_binary(), "-t", *(str(written) if one == "/callout.conf" else one for one in command)]
        variables = dict.fromkeys(PASSWORDS, "p1")
        done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_entrypoint_of_a_worker_in_compose_writes_its_grace_period_to_the_file_that_it_reads(
    tmp_path: Path,
) -> None:
    worker = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["worker"]
    tokenbus = tmp_path / "tokenbus"
    tokenbus.write_text('#!/bin/sh\necho "$@"; cat "$TOKENBUS_CONFIG"\n')
    tokenbus.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TOKENBUS_CONFIG": str(tmp_path / "worker.toml"),
        "GRACE_S": default(worker["environment"]["GRACE_S"]),
    }
    words = [word.replace("$$", "$") for word in worker["entrypoint"]] + ["worker", "--threads", "1"]
    said = subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout
    assert said == "worker --threads 1\n[worker]\ngrace-s = 10\n"
    parser = catalog.make_parser("worker")
    config.apply(parser, "worker", config.read(tmp_path / "worker.toml"), "worker.toml")
    assert parser.get_default("grace_s") == 10


def test_with_keys_compose_changes_services_that_there_are_and_keeps_what_the_broker_stores() -> None:
    whole, more = (yaml.safe_load((DEPLOY / file).read_text()) for file in ("compose.yaml", "compose.keys.yaml"))
    assert more["services"].keys() == {"nats", "router", "gateway"} <= whole["services"].keys()
    broker = more["services"]["nats"]
    assert broker["command"] == [*whole["services"]["nats"]["command"], "-js", "-sd", "/data"]
    assert broker["volumes"] == ["nats:/data"]
    assert "nats" in more["volumes"]
    usage = {"TOKENBUS_ROUTER_USAGE": "true"}
    for name, own in (("router", usage), ("gateway", {})):
        assert more["services"][name]["environment"] == {"TOKENBUS_KEYS": "bucket"} | own
        assert "environment" not in whole["services"][name], "it would be merged: look at both"
